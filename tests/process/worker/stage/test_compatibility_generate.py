"""Outputs under `allowed_token_ids` and forbidden sequences equal `generate` of transformers, token for token."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, PrefixConstrainedLogitsProcessor

from orca.bench.parts.tiny_families import reference_model, tiny_checkpoint
from support.worker.stage_driver import GREEDY, Ask, Chain, serve

EOS, TOKENS = 1, 12
PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), seed=1)


class OfOutput:
    """A processor that sees the output only, as vLLM's bad words do."""

    def __init__(self, inner: Any, prompt_length: int) -> None:
        self._inner, self._prompt_length = inner, prompt_length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._inner(ids[:, self._prompt_length :], scores)
        return found


def listed(allowed: Sequence[int], _batch: int, _ids: torch.Tensor) -> list[int]:
    return list(allowed)


def generated(model: Any, prompt: list[int], *processors: Any) -> list[int]:
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        logits_processor=[OfOutput(one, len(prompt)) for one in processors],
    )
    return list(answer[0, len(prompt) :].tolist())


@pytest.mark.timeout(300)
def test_limited_outputs_equal_transformers(folder: Path) -> None:
    model = reference_model(folder)
    asks, expected = [], []
    for prompt in PROMPTS:
        free = generated(model, prompt)
        words = [free[:1], free[2:4], free[4:8]]  # of an output without limits, so that they forbid tokens of it
        params = replace(
            GREEDY,
            allowed_token_ids=tuple(range(0, 199, 1 + len(prompt) % 2)),
            forbidden_token_ids=tuple(words[0]),
            forbidden_sequences=tuple(map(tuple, words[1:])),
        )
        allowed = PrefixConstrainedLogitsProcessor(partial(listed, params.allowed_token_ids), 1)
        limited = generated(model, prompt, allowed, NoBadWordsLogitsProcessor(words, eos_token_id=EOS))
        assert limited != free
        expected += [free, limited, limited]
        # The third goes on from a log that another rank has written.
        asks += [Ask(prompt, TOKENS), Ask(prompt, TOKENS, params), Ask(prompt, TOKENS, params, log=limited[:5])]
    chain = Chain(folder)
    serve(chain, asks)
    chain.close()
    assert [ask.output[: len(output)] for ask, output in zip(asks, expected, strict=True)] == expected
