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

from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.request import Request, SamplingParams
from orca.core.domain.step import NewRequest

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
    encoder_decoder: EncoderDecoder | None = None  # None: a decoder-only model


def refusal_of(request: Request | NewRequest, bounds: ModelBounds) -> str | None:
    """Return the reason why no group of the model can run a request, in words for its client; None if one can.

    Kernels read tables at these numbers without a check of their own, and a message cannot hold all of them.
    """
    return next(_reasons(request, bounds), None)


def _reasons(request: Request | NewRequest, bounds: ModelBounds) -> Iterator[str]:
    # The prompt, then on a stage the tokens of the log so far.
    tokens = request.prompt if isinstance(request, Request) else request.tokens
    sampling, last = request.sampling, bounds.vocab_size - 1
    if not tokens:
        yield "the prompt has no tokens"
    elif (unknown := _unknown(tokens, last)) is not None:
        yield f"the prompt has the token id {unknown}, and the model knows only ids from 0 to {last}"
    if bounds.encoder_decoder is not None:
        yield from _reasons_of_target(request, bounds.encoder_decoder, last)
    elif request.decoder_prefix:
        yield "the request has a decoder_prefix, and the model is a decoder-only model: it continues the prompt"
    elif bounds.positions is not None and request.max_total_tokens > bounds.positions:
        yield (
            f"prompt and output have {request.max_total_tokens} tokens, and the model has {bounds.positions} positions"
        )
    for name, value, low, high in _numbers(sampling, bounds):
        # JSON has no NaN: the pool may have stored one as null.
        if not isinstance(value, int | float) or not low <= value <= high:
            yield f"{name} has {value}, which is outside {low} to {high}"
    if sampling.grammar is not None and not isinstance(sampling.grammar, str):
        yield "grammar is not a text"
    if any(len(sequence) < 2 for sequence in sampling.forbidden_sequences):
        yield "forbidden_sequences has a sequence of fewer than two tokens"
    if sampling.min_tokens > 0 and len({*bounds.eos_token_ids, *sampling.stop_token_ids}) > last:
        yield "min_tokens forbids every token of the vocabulary: all of them end the output"


def _reasons_of_target(request: Request | NewRequest, model: EncoderDecoder, last: int) -> Iterator[str]:
    """Yield the reasons that only an encoder-decoder model has. Args: last: the largest token id of its decoder."""
    if not request.decoder_prefix:
        yield (
            "the request has no decoder_prefix, and the model is an encoder-decoder model: its output begins with"
            f" the token id {model.start_token_id}"
        )
    elif (unknown := _unknown(request.decoder_prefix, last)) is not None:
        yield f"decoder_prefix has the token id {unknown}, and the model knows only ids from 0 to {last}"
    tokens = request.prompt if isinstance(request, Request) else request.tokens
    for name, ids in (("the prompt", tokens), ("decoder_prefix", request.decoder_prefix)):
        if model.padding_token_id is not None and model.padding_token_id in ids:
            yield f"{name} has the padding token {model.padding_token_id}, and the model has no position for it"
    source = len(request.prompt) if isinstance(request, Request) else request.prompt_length
    if model.source_positions is not None and source > model.source_positions:
        yield f"the prompt has {source} tokens, and the model's encoder has {model.source_positions} positions"
    # A scheduler may have reserved more than the request can use.
    target = len(request.decoder_prefix) + (request.max_new_tokens or 0)
    if model.target_positions is not None and target > model.target_positions:
        yield (
            f"decoder_prefix and output have {target} tokens, and the model's decoder has {model.target_positions}"
            " positions"
        )
    if request.sampling.prompt_logprobs is not None:
        yield "prompt_logprobs is set, and an encoder-decoder model has no log probabilities of its prompt"


def _unknown(tokens: Sequence[int], last: int) -> int | None:
    """Return the first token id outside 0 to `last`; None if there is none."""
    if 0 <= min(tokens) <= max(tokens) <= last:
        return None
    return next(token for token in tokens if not 0 <= token <= last)


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
    for name in ("stop_token_ids", "allowed_token_ids", "forbidden_token_ids"):
        for token in getattr(sampling, name):
            yield name, token, 0, last
    for sequence in sampling.forbidden_sequences:
        for token in sequence:
            yield "forbidden_sequences", token, 0, last
