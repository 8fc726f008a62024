"""The bytes of a response: a pure function of the log and of the options that were stored at submit, as for chats.

The events of a stream are numbered from 0. A token has as many events as it makes, perhaps none. A client that has
event N goes on after it with `starting_after=N`, at any gateway. A stream has no `[DONE]`: its last event has the whole
response.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from orca.core.domain.request import End, FinishReason, Request, Token
from orca.gateway.errors import ApiError, end_error
from orca.gateway.formats.parts import AnswerDelta
from orca.gateway.formats.tables import stored_formats
from orca.gateway.render.chat_parts import ChatParts
from orca.gateway.render.render import ChoiceLog, RenderModel, RenderOptions, TokenDetails
from orca.gateway.responses.items import Event, OutputItems
from orca.gateway.responses.logprobs import ScoredText


class ResponseAnswer:
    """One response while its answer grows."""

    def __init__(self, request: Request, options: RenderOptions, render_model: RenderModel) -> None:
        formats = stored_formats(options.tool_format, options.reasoning_format)
        self._request = request
        self._options = options
        self._parts = ChatParts(request, render_model.tokenizer, formats, tools=options.tools)
        self._log = ChoiceLog(request, options, render_model, self._parts)
        self._items = OutputItems(request.id)
        is_scored = request.sampling.logprobs is not None
        self._scored = ScoredText(request, render_model.tokenizer, self._parts.marker_ids) if is_scored else None

    def token(self, token: Token) -> Iterator[Event]:
        """Yield the events of the log's next token."""
        delta, scored = self._log.push(token)
        if self._scored is not None:
            self._scored.push(scored)
        return self._added(delta)

    def end(self, end: End) -> Iterator[Event]:
        """Yield the events after the last token, the response's own as the last one."""
        if self._error_of(end) is None:
            yield from self._added(self._log.flush(end))
        yield from self._items.end(is_cut=end.reason is not FinishReason.STOP)
        response = self.response(end)
        yield (
            f"response.{'failed' if response['status'] == 'cancelled' else response['status']}",
            {"response": response},
        )

    def _added(self, delta: str | AnswerDelta) -> Iterator[Event]:
        assert not isinstance(delta, str), "a log with parts divides its text"
        logprobs = [] if self._scored is None else self._scored.take(delta)
        return self._items.add(delta, self._parts.ids_of(delta), logprobs)

    def response(self, end: End | None = None, *, status: str = "in_progress") -> dict[str, Any]:
        """Return the response. Args: status: of one without an end."""
        stored = {} if self._options.items is None else orjson.loads(self._options.items)
        error = None if end is None else self._error_of(end)
        status = status if end is None else _status(end)
        return {
            "id": self._request.parent,
            "object": "response",
            "created_at": self._options.created,
            "status": status,
            "error": None if error is None or status == "cancelled" else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._options.model,
            "output": self._items.items,
            "previous_response_id": None,
            "max_tool_calls": None,
            "service_tier": None,
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None if end is None else self._usage(end),
            **stored,
        }

    def _error_of(self, end: End) -> ApiError | None:
        return end_error(end, self._request, self._options.goals)

    def _usage(self, end: End) -> dict[str, Any]:
        prompt = len(self._request.prompt) + self._options.prefix_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._log.details.cached or 0},
            "output_tokens": end.count,
            "output_tokens_details": {"reasoning_tokens": self._parts.reasoning_tokens or 0},
            "total_tokens": prompt + end.count,
        }


class ResponseStream:
    """Writes the events of a response. To resume after event N, push all tokens and drop the events up to N."""

    def __init__(
        self, request: Request, options: RenderOptions, render_model: RenderModel, *, starting_after: int = -1
    ) -> None:
        """Args: starting_after: number of the last event that the client has; -1 for none."""
        self._answer = ResponseAnswer(request, options, render_model)
        self._starting_after = starting_after
        self._number = 0
        self.tokens_to_echo = 0
        self.details = TokenDetails()  # its own last event has them

    def opening(self) -> bytes:
        """Return the events before the first token."""
        response = self._answer.response()
        # What the answer has at this moment is no function of the log.
        return self._written(
            [("response.created", {"response": response}), ("response.in_progress", {"response": response})]
        )

    def token(self, token: Token) -> bytes:
        return self._written(self._answer.token(token))

    def end(self, end: End) -> bytes:
        return self._written(self._answer.end(end))

    def failure(self, error: ApiError) -> bytes:
        """Return an event that says why the stream ends early. Its number is that of the last event of the log."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        event = {"type": "error", **fields, "sequence_number": self._number - 1}
        return b"event: error\ndata: %b\n\n" % orjson.dumps(event)

    @property
    def last_event_id(self) -> str:
        """The number of the last event."""
        return str(self._number - 1)

    def _written(self, events: Iterable[Event]) -> bytes:
        written = []
        for kind, fields in events:
            if self._number > self._starting_after:
                event = {"type": kind, "sequence_number": self._number, **fields}
                written.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(event)))
            self._number += 1
        return b"".join(written)


def write_response(
    request: Request,
    options: RenderOptions,
    tokens: Sequence[Token],
    end: End | None,
    render_model: RenderModel,
    *,
    status: str = "in_progress",
) -> bytes:
    """Return a response from its log. Args: status: of one without an end."""
    answer = _read(request, options, tokens, end, render_model)
    return orjson.dumps(answer.response(end, status=status))


def output_items(
    request: Request, options: RenderOptions, tokens: Sequence[Token], end: End, render_model: RenderModel
) -> list[dict[str, Any]]:
    """Return the output items of a response that has ended, from its log."""
    items: list[dict[str, Any]] = _read(request, options, tokens, end, render_model).response(end)["output"]
    return items


def _read(
    request: Request, options: RenderOptions, tokens: Sequence[Token], end: End | None, render_model: RenderModel
) -> ResponseAnswer:
    answer = ResponseAnswer(request, options, render_model)
    for token in tokens:
        for _ in answer.token(token):
            pass
    if end is not None:
        for _ in answer.end(end):
            pass
    return answer


def _status(end: End) -> str:
    match end.reason:
        case FinishReason.STOP:
            return "completed"
        case FinishReason.LENGTH:
            return "incomplete"
        case FinishReason.CANCELLED:
            return "cancelled"
        case _:
            return "failed"


def _error(error: ApiError) -> dict[str, str]:
    return {"code": error.code, "message": error.message}
