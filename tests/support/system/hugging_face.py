"""The oracle of the system tests: what Hugging Face says, and where it nearly said something else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from orca.bench.parts.tiny_families import reference_model
from orca.core.domain.text import Tokenizer
from orca.core.grammars.matching import GrammarVocabulary
from orca.worker.stage.random_numbers import uniforms
from support.system.running_group import Work

MARGIN = 1e-4
"""A difference is excused only where the reference's own choice was closer than this (order of summation)."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An output and, for each of its tokens, how close the reference came to another one.

    Greedy: the distance between the two best logits. Sampled: that of the random number to the next token's share.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(slots=True)
class Verdict:
    """Counts over all outputs compared. After an excused difference the rest of an output cannot be compared."""

    compared: int = 0
    excused: int = 0
    wrong: list[str] = field(default_factory=list)

    def compare(self, name: str, got: Sequence[int], want: Reference) -> None:
        for index, token in enumerate(want.tokens):
            self.compared += 1
            if index < len(got) and got[index] == token:
                continue
            if want.margins[index] < MARGIN:
                self.excused += 1
            else:
                found = got[index] if index < len(got) else "the end"
                self.wrong.append(f"{name}: token {index} is {found}, Hugging Face has {token}")
            return
        if len(got) != len(want.tokens):
            self.wrong.append(f"{name}: {len(got)} tokens, Hugging Face has {len(want.tokens)}")


def generate(folder: Path, works: Sequence[Work]) -> list[Reference]:
    """Greedy outputs, one at a time, in float32 on the CPU."""
    model = reference_model(folder)
    references = []
    with torch.inference_mode():
        for work in works:
            ids = torch.tensor([work.prompt])
            options: dict[str, Any] = {"suppress_tokens": _never_drawn(model) or None}
            if work.sampling.grammar is not None:
                processor = GrammarProcessor(folder, work.sampling.grammar, model, ids_before=_ids_before(work))
                options["logits_processor"] = [processor]
            if work.decoder_prefix:
                # transformers' cache fails for a T5 that has more decoder layers than encoder layers.
                options |= {"decoder_input_ids": torch.tensor([work.decoder_prefix]), "use_cache": False}
            answer = model.generate(
                ids,
                **options,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=work.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
            best = torch.stack(answer.scores)[:, 0].topk(2).values
            tokens = tuple(answer.sequences[0, -len(best) :].tolist())
            references.append(Reference(tokens, tuple((best[:, 0] - best[:, 1]).tolist())))
    return references


def sample(folder: Path, works: Sequence[Work], temperature: float) -> list[Reference]:
    """Outputs drawn token by token from Hugging Face's logits: the definition.

    Token i is the first one, in order of ids, whose cumulated probability exceeds uniform(seed, i).
    """
    model = reference_model(folder)
    references = []
    with torch.inference_mode():
        for work in works:
            ids, margins = list(work.decoder_prefix or work.prompt), list[float]()
            given, grammar = len(ids), work.sampling.grammar
            mask = None if grammar is None else GrammarProcessor(folder, grammar, model, ids_before=given)
            while len(margins) < work.max_new_tokens and (not margins or ids[-1] != model.config.eos_token_id):
                inputs = {"input_ids": torch.tensor([ids])}
                if work.decoder_prefix:
                    inputs = {"input_ids": torch.tensor([work.prompt]), "decoder_input_ids": torch.tensor([ids])}
                logits = model(**inputs, use_cache=False).logits[0, -1].double()
                logits[_never_drawn(model)] = -math.inf
                if mask is not None:
                    logits = mask(torch.tensor([ids]), logits[None])[0]
                shares = torch.softmax(logits / temperature, dim=0).cumsum(0)
                number = float(uniforms([work.sampling.seed], [len(margins)])[0])
                token = int(torch.searchsorted(shares, number, right=True))
                below = float(shares[token - 1]) if token else 0.0
                margins.append(min(number - below, float(shares[token]) - number))
                ids.append(token)
            references.append(Reference(tuple(ids[given:]), tuple(margins)))
    return references


class GrammarProcessor:
    """A LogitsProcessor of transformers: a matcher reads the whole output anew for each token."""

    def __init__(self, folder: Path, grammar: str, model: Any, *, ids_before: int) -> None:
        """Args: ids_before: tokens of each sequence before its output."""
        self._vocabulary = _vocabulary(folder, model.config.vocab_size, model.config.eos_token_id)
        self._grammar, self._ids_before = grammar, ids_before

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = self._vocabulary.matcher(self._grammar)
        matcher.consume(input_ids[0, self._ids_before :].tolist())
        mask = matcher.mask()
        assert matcher.failure is None
        left_out = [token for token in range(scores.shape[1]) if not mask[token // 8] >> (token % 8) & 1]
        masked = scores.clone()
        masked[:, left_out] = -math.inf
        return masked


@cache
def _vocabulary(folder: Path, vocab_size: int, eos_token_id: int) -> GrammarVocabulary:
    return GrammarVocabulary(Tokenizer.from_folder(folder), vocab_size, (eos_token_id,))


def _ids_before(work: Work) -> int:
    return len(work.decoder_prefix or work.prompt)


def _never_drawn(model: Any) -> list[int]:
    """Return the tokens that Orca never draws: M2M-100 gives padding no position."""
    return [model.config.pad_token_id] if model.config.model_type == "m2m_100" else []
