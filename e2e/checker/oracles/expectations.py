"""Two ways to get the expected answer of a call: compute it (chain models), or ask the system before any fault."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from checker.clients.client import Client
from checker.clients.digit_pattern import DigitPattern
from checker.clients.workload import PlannedCall
from checker.history.answers import Call, gather_calls, max_tokens_of
from checker.history.records import Expected, HistoryWriter
from checker.oracles.chain_model import CHAIN, load_chain_model
from checker.oracles.chain_oracle import expected_tokens
from checker.oracles.model_folder import model_type_of, text_of, tokens_of
from checker.oracles.seq2seq_chain_model import SEQ2SEQ_CHAIN, load_seq2seq_chain_model
from checker.oracles.seq2seq_chain_oracle import expected_answer

CHAIN_TYPES = (CHAIN, SEQ2SEQ_CHAIN)
"""Types of models whose answers an oracle computes."""


class Oracle(Protocol):
    """A chain model, as an answer to a planned call needs it."""

    eos_token_id: int | None

    def tokens(self, prompt: Sequence[int], prefix: Sequence[int], count: int, **sampling: Any) -> list[int]:
        """Return an output.

        Args:
            prefix: of the target; empty with a decoder-only model.
            sampling: seed, temperature and pattern, as in `expected_tokens`.
        """
        ...


class DecoderOracle:
    """The oracle of a decoder-only chain model."""

    def __init__(self, folder: Path) -> None:
        self._model = load_chain_model(folder)
        self.eos_token_id = self._model.eos_token_id

    def tokens(self, prompt: Sequence[int], prefix: Sequence[int], count: int, **sampling: Any) -> list[int]:
        assert not prefix, "a decoder-only model takes no decoder_prefix"
        return expected_tokens(self._model, prompt, count, **sampling)


class EncoderDecoderOracle:
    """The oracle of an encoder-decoder chain model."""

    def __init__(self, folder: Path) -> None:
        self._model = load_seq2seq_chain_model(folder)
        self.eos_token_id = self._model.eos_token_id

    def tokens(self, prompt: Sequence[int], prefix: Sequence[int], count: int, **sampling: Any) -> list[int]:
        return expected_answer(self._model, prompt, count, prefix=prefix, **sampling)


def chain_expectations(folder: Path, plans: Sequence[PlannedCall], *, at: float) -> list[Expected]:
    """Return the answers of a chain model, computed from its folder alone."""
    is_encoder_decoder = model_type_of(folder) == SEQ2SEQ_CHAIN
    model: Oracle = EncoderDecoderOracle(folder) if is_encoder_decoder else DecoderOracle(folder)
    found: list[Expected] = []
    for plan in plans:
        if plan.intent != "finish":
            continue
        prompts, choices = _prompts(plan), plan.body.get("n") or 1
        found += [
            _chain_choice(model, plan, prompts[choice // choices], choice, choice % choices, at)
            for choice in range(len(prompts) * choices)
        ]
    return found


def _chain_choice(
    model: Oracle, plan: PlannedCall, prompt: list[int], choice: int, sibling: int, at: float
) -> Expected:
    body = plan.body
    limit = max_tokens_of(body) or 16
    # The choices of a prompt have consecutive seeds.
    prefix = body.get("decoder_prefix") or []
    given = tokens_of(prefix) if isinstance(prefix, str) else prefix
    regex = (body.get("structured_outputs") or {}).get("regex")
    pattern = None if regex is None else DigitPattern.parse(regex)
    seed, temperature = body["seed"] + sibling, body["temperature"]
    tokens = model.tokens(prompt, given, limit, seed=seed, temperature=temperature, pattern=pattern)
    tokens, is_stopped = cut_at_stop(tokens, body.get("stop") or ())
    is_stopped = is_stopped or tokens[-1] == model.eos_token_id
    reason = "stop" if is_stopped else "length"
    return Expected(at=at, call=plan.name, choice=choice, tokens=tuple(tokens), finish_reason=reason)


def cut_at_stop(tokens: Sequence[int], stops: Sequence[str]) -> tuple[list[int], bool]:
    """Return the tokens up to the one that completes a stop string, and True if there was one."""
    text = ""
    for place, token in enumerate(tokens):
        text += text_of([token])
        if any(stop in text for stop in stops):
            return list(tokens[: place + 1]), True
    return list(tokens), False


def _prompts(plan: PlannedCall) -> list[list[int]]:
    prompt = plan.body["prompt"]
    if isinstance(prompt, str):
        return [tokens_of(prompt)]
    return prompt if isinstance(prompt[0], list) else [prompt]


async def undisturbed_expectations(
    url: str, http: httpx.AsyncClient, plans: Sequence[PlannedCall], folder: Path, *, seed: int, at: float
) -> list[Expected]:
    """Return the answers of the system itself to the same calls before any fault.

    They prove that faults change nothing. They do not prove that the answers are right.
    """
    asked = [_asking_for_ids(plan) for plan in plans if plan.intent == "finish"]
    with HistoryWriter(folder / "undisturbed.jsonl") as history:
        client = Client([url], http, history, seed=seed, can_resume=False)
        gate = asyncio.Semaphore(8)

        async def one(plan: PlannedCall) -> None:
            async with gate:
                await client.call(plan)

        await asyncio.gather(*map(one, asked))
    return [expected for call in gather_calls(history.records) for expected in _as_expected(call, at)]


def _asking_for_ids(plan: PlannedCall) -> PlannedCall:
    body = plan.body | {"stream": False, "return_token_ids": True}
    body.pop("stream_options", None)
    return PlannedCall(name=plan.name, due_s=0.0, path=plan.path, body=body)


def _as_expected(call: Call, at: float) -> list[Expected]:
    assert call.is_accepted, f"{call.name} got no answer from the undisturbed system"
    return [
        Expected(
            at=at,
            call=call.name,
            choice=choice.number,
            tokens=choice.token_ids or (),
            finish_reason=choice.end.finish_reason if choice.end else None,
        )
        for choice in call.choices()
    ]
