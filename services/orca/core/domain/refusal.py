"""The refusal of a request: what a group cannot run of one request, whatever the group's state.

Two things may go wrong between a step and its result, and they are different types everywhere:

    refusal       `Refused` in the step's result. It is about one request: its tokens, its parameters, its numbers. That
                  request ends with the reason, and its group and its neighbours go on.
    EngineError   about the group: a process, a link, memory, or two parts that disagree about their state. The epoch
                  ends, and the pool's rule of poison finds out whether a request was the cause (pool/poison.py).

`refusal_of` is a pure function of the request and of the model. So every rank of every stage comes to the same decision
at the same step, and no rank needs to hear of another's. A reason that only one rank can know is a refusal only on the
rank that samples, because that one writes the result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orca.core.domain.request import SamplingParams

INT32_MAX = (1 << 31) - 1
"""Largest number that most fields of a step's message hold (engine.proto)."""
SEED_MAX = (1 << 63) - 1
FLOAT_MAX = 3e38
"""Largest finite number of float32, in which logits are changed, rounded down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBounds:
    """The bounds that a model sets for a request."""

    vocab_size: int  # rows of the embedding
    positions: int | None = None  # rows of the table of learned positions; None: the model has none
    eos_token_ids: tuple[int, ...] = ()


def refusal_of(
    tokens: Sequence[int], max_total_tokens: int, sampling: SamplingParams, bounds: ModelBounds
) -> str | None:
    """Return the reason why no group of the model can run a request, in words for its client; None if one can.

    Kernels read tables at these numbers without a check of their own, and a message cannot hold all of them.

    Args:
        tokens: prompt, then the tokens of its log so far.
        max_total_tokens: prompt and output.
    """
    return next(_reasons(tokens, max_total_tokens, sampling, bounds), None)


def _reasons(
    tokens: Sequence[int], max_total_tokens: int, sampling: SamplingParams, bounds: ModelBounds
) -> Iterator[str]:
    last = bounds.vocab_size - 1
    if not tokens:
        yield "the prompt has no tokens"
    elif not 0 <= min(tokens) <= max(tokens) <= last:
        unknown = next(token for token in tokens if not 0 <= token <= last)
        yield f"the prompt has the token id {unknown}, and the model knows only ids from 0 to {last}"
    if bounds.positions is not None and max_total_tokens > bounds.positions:
        yield f"prompt and output have {max_total_tokens} tokens, and the model has {bounds.positions} positions"
    for name, value, low, high in _numbers(sampling, bounds):
        # JSON has no NaN: the pool may have stored one as null.
        if not isinstance(value, int | float) or not low <= value <= high:
            yield f"{name} has {value}, which is outside {low} to {high}"
    if sampling.min_tokens > 0 and len({*bounds.eos_token_ids, *sampling.stop_token_ids}) > last:
        yield "min_tokens forbids every token of the vocabulary: all of them end the output"


def _numbers(sampling: SamplingParams, bounds: ModelBounds) -> Iterator[tuple[str, float, float, float]]:
    """Yield each number of the parameters with its least and its largest value. NaN is never between them."""
    last = bounds.vocab_size - 1
    yield "temperature", sampling.temperature, 0, FLOAT_MAX
    yield "top_k", 1 if sampling.top_k is None else sampling.top_k, 1, INT32_MAX
    yield "top_p", sampling.top_p, 0, 1
    yield "min_p", sampling.min_p, 0, 1
    yield "repetition_penalty", sampling.repetition_penalty, 0.01, 10
    yield "presence_penalty", sampling.presence_penalty, -2, 2
    yield "frequency_penalty", sampling.frequency_penalty, -2, 2
    yield "seed", sampling.seed, 0, SEED_MAX
    yield "min_tokens", sampling.min_tokens, 0, INT32_MAX
    yield "logprobs", sampling.logprobs or 0, 0, INT32_MAX
    yield "prompt_logprobs", sampling.prompt_logprobs or 0, 0, INT32_MAX
    for token, bias in sampling.logit_bias:
        yield "logit_bias", token, 0, last
        yield "logit_bias", bias, -FLOAT_MAX, FLOAT_MAX
    for token in sampling.stop_token_ids:
        yield "stop_token_ids", token, 0, last
