"""The part of a call that only encoder-decoder models have: the beginning of its targets.

The prompt of such a call is the source. All targets of the call begin alike: with the start token, then the forced
token or the call's `decoder_prefix`. The output does not continue the source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.errors import InvalidRequest, NotStoredYet
from orca.gateway.calls.bodies import CompletionBody, GenerationBody
from orca.gateway.calls.token_ids import check_token_ids
from orca.gateway.calls.token_limits import FIELDS, NO_LIMITS, TokenLimits
from orca.gateway.errors import UNAVAILABLE, ApiError, unsupported
from orca.gateway.formats.tables import ReasoningFormat
from orca.gateway.formats.tools import CallTools
from orca.gateway.grammars.fields import NamedGrammar
from orca.gateway.latency_goals import TTFT_HEADER
from orca.gateway.models.models import ServedModel
from orca.pool.schemas import SCHEMA_OF_SALTS, SCHEMA_OF_TARGETS

PREFIX = "decoder_prefix"


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of a call for one model."""

    prompts: Sequence[Sequence[int]]  # the sources of an encoder-decoder model
    target: tuple[int, ...] = ()  # the beginning of every target, start token first; empty for other models
    prefix_tokens: int = 0  # those of `target` that the call gives: they count as prompt
    grammar: NamedGrammar | None = None  # of every answer
    tools: CallTools | None = None  # that every answer may call
    limits: TokenLimits = NO_LIMITS
    reasoning: ReasoningFormat | None = None  # as every answer is read


def check_target_fields(body: GenerationBody, model: ServedModel) -> None:
    """Check the fields that depend on the kind of the model. Raises: InvalidRequest, ApiError."""
    prefix = body.decoder_prefix
    if model.info.encoder_decoder is None:
        if prefix is not None:
            message = f"{PREFIX}: only encoder-decoder models have one, and {model.info.name!r} is a decoder-only model"
            raise InvalidRequest(message, param=PREFIX)
        return
    if prefix is not None and not isinstance(prefix, str):
        check_token_ids(prefix, model.info.vocab_size, param=PREFIX)
    if body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "an encoder-decoder model does not score its prompt")
    if not isinstance(body, CompletionBody):
        return
    if body.echo:
        raise unsupported("echo", "an encoder-decoder model's output does not continue the prompt")
    if body.max_tokens == 0:
        message = "max_tokens: must be at least 1: an encoder-decoder model does not score its prompt"
        raise InvalidRequest(message, param="max_tokens")


async def begin_targets(body: GenerationBody, prompts: Mapping[str, Sequence[int]], model: ServedModel) -> CallTokens:
    """Add the beginning of the targets to the prompts.

    Args:
        prompts: by the name of their field.
    Raises: ApiError, InvalidRequest.
    """
    kind, prefix = model.info.encoder_decoder, body.decoder_prefix
    if kind is None:
        return CallTokens([*prompts.values()])
    for name, tokens in prompts.items():
        _check_padding(tokens, kind, param=name)
    if isinstance(prefix, list) and body.model not in (None, model.info.name):
        raise other_ids(PREFIX, body.model, model)
    if isinstance(prefix, str):
        # Special tokens that are written in the text count as such.
        prefix = await model.encoder.encode_prompt(prefix, param=PREFIX, add_special_tokens=False)
    prefix = tuple(prefix or ())
    _check_padding(prefix, kind, param=PREFIX)
    has_start = prefix[:1] == (kind.start_token_id,)
    return CallTokens([*prompts.values()], kind.beginning(prefix), len(prefix) - has_start)


def _check_padding(tokens: Sequence[int], model: EncoderDecoder, *, param: str) -> None:
    """Raises: InvalidRequest for padding, if the model has no position for it."""
    if model.padding_token_id is None or model.padding_token_id not in tokens:
        return
    raise InvalidRequest(
        f"{param}: has the padding token, id {model.padding_token_id}, and this model has no position for it; "
        "leave the padding out",
        param=param,
    )


def other_ids(param: str, name: str | None, model: ServedModel) -> ApiError:
    """Return the error for token ids that were written for another model: unlike text, they mean something else."""
    what = "the prompt" if param == "prompt" else param
    message = f"{what} is token ids for {name!r}, but {model.info.name!r} is the current model"
    return ApiError(409, message, param=param, code="model_replaced")


def needs_newer_schema(error: NotStoredYet, model: ServedModel, tokens: CallTokens) -> ApiError | NotStoredYet:
    """Return the error for a call that the pool cannot store yet: no call to an encoder-decoder model can change it."""
    if model.info.encoder_decoder is None:
        # The client knows the fields that these were made from.
        made_from = {**FIELDS, "weight": "priority", "first_token_goal_ms": TTFT_HEADER}
        if tokens.grammar is not None:
            made_from["grammar"] = tokens.grammar.param
        names = dict.fromkeys(made_from.get(name, name) for name in error.names)
        return NotStoredYet(tuple(names), error.in_force)
    return _unavailable_until(
        SCHEMA_OF_TARGETS, f"{model.info.name!r} is an encoder-decoder model. Its calls need", error.in_force
    )


def salts_not_stored_yet(error: NotStoredYet) -> ApiError:
    """Return the error for a call that shares prefixes with calls of its API key only: no change of it would help."""
    why = "This server shares prompts only between calls of one API key (--prefix-sharing key). Calls need"
    return _unavailable_until(SCHEMA_OF_SALTS, why, error.in_force)


def _unavailable_until(schema: int, why: str, in_force: int) -> ApiError:
    message = (
        f"{why} schema {schema} in the request pool, and schema {in_force} of the release before is in force. Whoever"
        f" runs this server puts it in force after the upgrade: orca pool schema {schema}, with the --data of orca up"
        " or the --pool of a cluster"
    )
    return ApiError(503, message, kind=UNAVAILABLE, code="newer_schema_needed", retry_after_s=10)
