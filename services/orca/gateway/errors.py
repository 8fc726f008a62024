"""Error answers to clients; every one is decided here.

ApiError            an answer in OpenAI's shape: status, type, param, code, perhaps Retry-After
`api_error`         OrcaError -> ApiError
`context_error`     a prompt and an output that are too long for the model -> ApiError
`source_error`, `target_error`    the same for either part of an encoder-decoder model -> ApiError
`split_error`       a request of such a model that never fits into the slots -> ApiError
`end_error`         an end from outside the generation -> ApiError
`error_response`    ApiError -> HTTP
`unsupported`       a value that is valid elsewhere -> ApiError
`shown`             a value that a client sent -> a few words in an error

If the value of a field or header is wrong, the message begins with its name: `temperature: must be at most 2, not 3`.
Clients match on other messages: LiteLLM and LangChain on those of a context that is too short, others on those of an
unknown model, a wrong key, a rate and an unsupported parameter. These messages begin as OpenAI's do.
"""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from orca.core.domain.errors import (
    InvalidRequest,
    JustForgotten,
    NameTaken,
    NeverFits,
    OrcaError,
    PoolFull,
    PoolNotDurable,
    PoolUnavailable,
    QueueFull,
    UnknownRequest,
)
from orca.core.domain.request import End, FinishReason, Request, tokens_of_any_split
from orca.gateway.latency_goals import LatencyGoals

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"

MESSAGE_CHARACTERS_MAX, PARAM_CHARACTERS_MAX = 1000, 100
VALUE_CHARACTERS_MAX = 40

# openai-python 3 puts only the message into the text of its exception, where LangChain looks for the code.
SHORTEN_BOTH = "Please reduce the length of the messages or completion. (context_length_exceeded)"
SHORTEN_PROMPT = "Please reduce the length of the messages. (context_length_exceeded)"


class ApiError(Exception):
    """An error answer. `body()` is sent in a response or as an event of a stream."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str,
        retry_after_s: float | None = None,
        closes: bool = False,
        is_final: bool = False,
    ) -> None:
        """
        Args:
            kind: OpenAI's `type`.
            param: the field at fault; None, never empty, if there is none or it has no name.
            code: a code for programs, of this kind of refusal only.
            closes: the rest of the request was not read, so the connection cannot be used again.
            is_final: tell the official clients, which retry 408, 409, 429 and 5xx, not to retry.
        """
        super().__init__(message)
        self.status = status
        # A quotation from the client may have megabytes.
        self.message = _shortened(message, MESSAGE_CHARACTERS_MAX)
        self.kind = kind
        self.param = _shortened(param, PARAM_CHARACTERS_MAX) if param else None
        self.code = code
        self.retry_after_s = retry_after_s
        self.closes = closes
        self.is_final = is_final

    def detail(self) -> dict[str, str | None]:
        """Return the fields of the error in OpenAI's shape."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        return orjson.dumps({"error": self.detail()})

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            # The official clients read the milliseconds first; in whole seconds they would all come back together.
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after_s * 1000))
        if self.closes:
            headers["connection"] = "close"
        if self.is_final:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def api_error(error: OrcaError) -> ApiError:
    """Map our errors to HTTP; no other function does."""
    message = str(error)
    match error:
        case NeverFits():
            message = (
                f"This model's maximum context length is {error.promised} tokens with the memory of this deployment. "
                f"However, you requested {error.need} tokens. {SHORTEN_BOTH}"
            )
            return ApiError(400, message, param=error.param, code="never_fits")
        case InvalidRequest():
            return ApiError(400, message, param=error.param, code="invalid_value")
        case QueueFull():
            return ApiError(429, message, kind="overloaded_error", code="queue_full", retry_after_s=error.retry_after_s)
        case NameTaken():
            message = "this Idempotency-Key was used for another call: the same key needs the same path and body"
            return ApiError(422, message, param="Idempotency-Key", code="idempotency_key_reused")
        case PoolFull():
            return ApiError(503, message, kind=UNAVAILABLE, code="pool_full", retry_after_s=error.retry_after_s)
        case PoolNotDurable():
            message = "the request pool cannot store requests durably at the moment"
            return ApiError(503, message, kind=UNAVAILABLE, code="pool_not_durable", retry_after_s=1)
        case PoolUnavailable():
            # Its own message names internal addresses.
            log.warning("a call was refused, the pool does not answer: %s", message)
            message = "the request pool does not answer"
            return ApiError(503, message, kind=UNAVAILABLE, code="pool_unavailable", retry_after_s=1)
        case JustForgotten():
            message = "the call of this Idempotency-Key was deleted a moment ago"
            retry_after_s = max(1.0, error.rest_s)
            return ApiError(409, message, param="Idempotency-Key", code="response_deleted", retry_after_s=retry_after_s)
        case UnknownRequest():
            return ApiError(404, f"there is no request {message!r}, or it is no longer stored", code="unknown_request")
        case _:
            return ApiError(500, message, kind="server_error", code="internal_error")


def context_error(
    limit: int, prompt_tokens: int, new_tokens: int | None, *, param: str, beginning: int = 0
) -> ApiError:
    """Return the error for tokens that exceed the model's context.

    Args:
        new_tokens: the output that the call asks for; None if it names no number. Any output has at least one token.
        beginning: tokens of an encoder-decoder model's target before its output.
    """
    is_prompt_alone = new_tokens is None and prompt_tokens > limit
    new_tokens = new_tokens or 1
    if beginning:
        total = prompt_tokens + beginning + new_tokens
        message = (
            f"This model's maximum context length is {limit} tokens for source and target together. However, you "
            f"requested {total} tokens ({prompt_tokens} in the messages, {beginning} at the beginning of the target, "
            f"{new_tokens} in the completion). {SHORTEN_BOTH}"
        )
        return ApiError(400, message, param=param, code="context_length_exceeded")
    if is_prompt_alone:
        message = (
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. {SHORTEN_PROMPT}"
        )
        return ApiError(400, message, param=param, code="context_length_exceeded")
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt_tokens + new_tokens} "
        f"tokens ({prompt_tokens} in the messages, {new_tokens} in the completion). {SHORTEN_BOTH}"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def source_error(limit: int, source_tokens: int, *, param: str) -> ApiError:
    """Return the error for a source that is longer than an encoder-decoder model allows."""
    message = (
        f"This model's maximum context length is {limit} tokens for the source. However, your messages resulted in "
        f"{source_tokens} tokens. {SHORTEN_PROMPT}"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def target_error(limit: int, beginning: int, new_tokens: int | None, *, param: str) -> ApiError:
    """Return the error for a target that is longer than an encoder-decoder model allows.

    Args: new_tokens: the output that the call asks for; None if the beginning leaves no room for any.
    """
    rest = (
        f"its beginning has {beginning} tokens, and the completion needs one more. Please shorten decoder_prefix. "
        "(context_length_exceeded)"
        if new_tokens is None
        else f"you requested {beginning + new_tokens} tokens ({beginning} at its beginning, {new_tokens} in the "
        f"completion). {SHORTEN_BOTH}"
    )
    message = f"This model's maximum context length is {limit} tokens for the target. However, {rest}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def split_error(request: Request, error: NeverFits, block_tokens: int) -> ApiError:
    """Return the error for a request of an encoder-decoder model whose source and target find no KV blocks.

    Their blocks decide, so tokens alone do not tell why. Args: request: the largest one of the call.
    """
    source, beginning, new = len(request.prompt), len(request.decoder_prefix), request.max_new_tokens
    message = (
        f"This model's maximum context length is {tokens_of_any_split(error.promised, block_tokens)} tokens for source "
        f"and target together with the memory of this deployment: {error.promised} slots, in blocks of {block_tokens}. "
        f"However, you requested {source + beginning + new} tokens, which need {error.need} slots ({source} tokens in "
        f"the messages, {beginning} at the beginning of the target, {new} in the completion). {SHORTEN_BOTH}"
    )
    return ApiError(400, message, param=error.param, code="never_fits")


def end_error(end: End, request: Request, goals: LatencyGoals) -> ApiError | None:
    """Return the error for an end from outside; None for a generation's own ends.

    Somebody asked for a deadline or a cancellation, and a failure has used every attempt that the pool grants: if the
    client tried again, all would be computed again. Only after a replaced model the same call is served at once.

    Args: goals: of the call.
    """
    match end.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.CANCELLED:
            return ApiError(409, "the request was cancelled", code="cancelled", is_final=True)
        case FinishReason.DEADLINE_EXCEEDED:
            return _late_error(end, request, goals)
        case FinishReason.MODEL_REPLACED:
            message = "the model was replaced before the request could finish"
            return ApiError(503, message, kind=UNAVAILABLE, code="model_replaced", retry_after_s=1)
        case FinishReason.REFUSED:
            message = f"the model cannot run this request: {end.detail}"
            return ApiError(400, message, code="request_refused")
        case FinishReason.ERROR:
            # It failed alone too (pool/poison.py), or the first group was too small for a request accepted before it.
            message = "the request cannot be run: every group that ran it failed, or none has memory for it"
            return ApiError(500, message, kind="server_error", code="failed", is_final=True)


def _late_error(end: End, request: Request, goals: LatencyGoals) -> ApiError:
    """Return the error for a deadline. `param` names the field or header that asked for it."""
    asked = goals.deadline_in_force(request, end.count)
    param, allowed = (None, "") if asked is None else (asked.param, f" ({asked})")
    message = f"the request's deadline passed{allowed}"
    if end.detail is not None:
        message = f"the request was too late{allowed}: {end.detail}"
    return ApiError(504, message, kind="timeout_error", param=param, code="deadline_exceeded", is_final=True)


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """Args: headers: of the response, in addition to the error's own."""
    return Response(
        error.body(),
        status_code=error.status,
        headers={**(headers or {}), **error.headers()},
        media_type="application/json",
    )


def unsupported(param: str, complaint: str) -> ApiError:
    """Return the error for a value that is valid elsewhere and that this server does not have."""
    return ApiError(400, f"{param}: {complaint}", param=param, code="unsupported_parameter")


def shown(value: Any) -> str:
    """Return a JSON value as an error quotes it: short, with objects and lists as words."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, str):
        return repr(_shortened(value, VALUE_CHARACTERS_MAX))
    return json.dumps(value)


def _shortened(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else f"{text[: characters_max - 3]}..."
