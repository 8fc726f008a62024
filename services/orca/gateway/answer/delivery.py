"""Delivers the answer of an accepted call to its client, as a stream of events or whole.

A delivery is a plain ASGI response. When the client leaves, it removes its reader entry. The pool does the rest.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca.core.domain.errors import UnknownRequest
from orca.core.domain.request import End, Request, Token
from orca.gateway.answer.log_watcher import LogSubscription
from orca.gateway.answer.offload import in_thread, is_long, write_answer
from orca.gateway.errors import ApiError, api_error, end_error
from orca.gateway.http.connection import SEND_BODY
from orca.gateway.limits.drain import Drain, draining_error
from orca.gateway.metrics import GatewayMetrics
from orca.gateway.render.cursor import Cursor, ResumedChoice
from orca.gateway.render.render import (
    AnswerKind,
    ChoiceStream,
    RenderModel,
    RenderOptions,
    resume_event,
    stream_end,
)
from orca.gateway.responses.response import ResponseStream
from orca.pool.records import LogSlice

log = logging.getLogger(__name__)

AnswerStream = ChoiceStream | ResumedChoice | ResponseStream


@dataclass(slots=True)
class CallTiming:
    """Times of a call in seconds, on the clock of `time.perf_counter`."""

    started: float
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


class TokenTimes:
    """The times of each request's first and last token on this connection, on the clock of `time.perf_counter`."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def record(self, request_id: str, now: float) -> None:
        self._first.setdefault(request_id, now)
        self._last[request_id] = now

    def mean_gap(self, request_id: str, tokens: int) -> float | None:
        """Return the mean seconds between two tokens; None for a request with fewer than two.

        Args: tokens: all tokens of the request.
        """
        if tokens < 2 or request_id not in self._first:
            return None
        return (self._last[request_id] - self._first[request_id]) / (tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedCall:
    """A call that the pool has stored."""

    requests: Sequence[Request]
    options: RenderOptions
    subscription: LogSubscription
    timing: CallTiming
    remove_reader: Callable[[bool], None]  # removes the reader entry; the argument is whether all ends were read
    cursor: Cursor = field(default_factory=dict)  # the events that a stream's client has already
    is_resumed: bool = False  # an earlier connection made the call
    ended_before: frozenset[str] = frozenset()  # requests that had ended when the client came back
    # Prompt tokens that were not computed, by request, as far as first tokens were read and say so.
    cached_tokens: dict[str, int] = field(default_factory=dict)
    # Called when the connection is over, with the ends that were sent, by request.
    on_closed: Callable[["AcceptedCall", Mapping[str, End]], None] = field(default=lambda _accepted, _ends: None)

    @property
    def parent(self) -> str:
        return self.requests[0].parent


class Delivery(Response):
    """The common part of streams and whole answers: the client may leave at any moment."""

    def __init__(
        self, accepted: AcceptedCall, render_model: RenderModel, metrics: GatewayMetrics, drain: Drain
    ) -> None:
        super().__init__()
        self._accepted = accepted
        self._render_model = render_model
        self._metrics = metrics
        self._drain = drain
        self._ends: dict[str, End] = {}
        self._token_times = TokenTimes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = self._accepted
        gone = asyncio.create_task(_wait_until_gone(receive))
        gone.add_done_callback(lambda _: accepted.subscription.close())
        self._drain.add(accepted.subscription.close)
        self._metrics.open_connections.inc()
        try:
            await self._deliver(scope, send)
        finally:
            gone.cancel()
            self._drain.remove(accepted.subscription.close)
            accepted.subscription.close()
            accepted.remove_reader(self._has_ended())
            self._metrics.open_connections.dec()
            self._log_end()

    async def _deliver(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError

    def _record(self, parts: Sequence[tuple[str, LogSlice]], tokens: int) -> None:
        """Record the times of the tokens that are sent now, and the ends. Args: tokens: their number."""
        now = time.perf_counter()
        timing = self._accepted.timing
        if tokens:
            self._metrics.generation_tokens_total.inc(tokens)
            if self._accepted.requests[0].decoder_prefix:
                self._metrics.target_tokens_total.inc(tokens)
            if timing.first_token is None:
                timing.first_token = now
                if not self._accepted.is_resumed:
                    self._metrics.time_to_first_token.observe(now - timing.started)
            elif timing.last_token is not None:
                # Choices of one parent run side by side: each has its own gaps.
                gap = (now - timing.last_token) * len(parts) / tokens
                for _ in range(tokens):
                    self._metrics.inter_token_latency.observe(gap)
            timing.last_token = now
        for request_id, part in parts:
            if part.tokens:
                self._token_times.record(request_id, now)
                if (cached := part.tokens[0].cached_prompt_tokens) is not None:
                    self._accepted.cached_tokens[request_id] = cached
            if part.end is not None:
                self._ends[request_id] = part.end
                if request_id not in self._accepted.ended_before:
                    # Count here and not after the last end, which a client that leaves never sees.
                    self._metrics.count_end(part.end.reason)
                    self._metrics.generation_tokens.observe(part.end.count)
                    gap_s = self._token_times.mean_gap(request_id, part.end.count)
                    # A client that comes back has seen the first token on another connection.
                    if gap_s is not None and not self._accepted.is_resumed:
                        self._metrics.time_per_output_token.observe(gap_s)
        if self._has_ended():
            timing.ended = now
            self._record_prompts()

    def _record_prompts(self) -> None:
        """Record the wishes and the lengths of the call's prompts, each with its choices."""
        accepted, size = self._accepted, self._accepted.options.choices_per_prompt
        for first in range(0, len(accepted.requests), size):
            choices = accepted.requests[first : first + size]
            counted = [request for request in choices if request.id not in accepted.ended_before]
            for request in counted:
                self._metrics.params_max_tokens.observe(request.max_new_tokens)
            if counted:
                self._metrics.params_n.observe(size)
                longest = max(self._ends[request.id].count for request in choices)
                self._metrics.max_generation_tokens.observe(longest)

    def _has_ended(self) -> bool:
        return len(self._ends) == len(self._accepted.requests)

    def _ends_in_order(self) -> list[End]:
        return [self._ends[request.id] for request in self._accepted.requests]

    def _log_end(self) -> None:
        """Count and log how the call ended for its client."""
        accepted = self._accepted
        accepted.on_closed(accepted, self._ends)
        if not self._has_ended():
            self._metrics.disconnects.inc()
            log.info(
                "answer cut" if self._drain.is_cut else "client left",
                extra={"request_id": accepted.parent, "ended": len(self._ends)},
            )
            return
        ends = self._ends_in_order()
        seconds = time.perf_counter() - accepted.timing.started
        if not accepted.is_resumed:
            self._metrics.e2e_latency.observe(seconds)
        reasons = ",".join(dict.fromkeys(end.reason for end in ends))
        tokens = sum(end.count for end in ends)
        log.info(
            "call ended",
            extra={"request_id": accepted.parent, "reasons": reasons, "tokens": tokens, "seconds": round(seconds, 3)},
        )


class StreamDelivery(Delivery):
    """Delivers server-sent events. Those that wait are sent in one write, except after a long prompt that is echoed."""

    def __init__(
        self,
        accepted: AcceptedCall,
        render_model: RenderModel,
        metrics: GatewayMetrics,
        drain: Drain,
        *,
        keep_alive_s: float,
    ) -> None:
        """Args: keep_alive_s: a stream that has been quiet for this long sends a comment."""
        super().__init__(accepted, render_model, metrics, drain)
        self._keep_alive_s = keep_alive_s
        self._written_s = 0.0  # last write, on the loop's clock

    async def _deliver(self, scope: Scope, send: Send) -> None:
        await send(_start(200, self._stream_headers()))
        send = scope.get("extensions", {}).get(SEND_BODY, {"send": send})["send"]
        self._written_s = asyncio.get_running_loop().time()
        # As for ids: a client that does not ask for event streams may read every line as an event.
        comments = asyncio.create_task(self._keep_alive(send)) if self._accepted.options.event_ids else None
        try:
            async for events in self._all_events():
                self._written_s = asyncio.get_running_loop().time()
                await send(_body(events, more=True))
        finally:
            if comments is not None:
                comments.cancel()
        await send(_body(b"", more=False))

    async def _keep_alive(self, send: Send) -> None:
        """Send comments, which clients skip: they distinguish a stream that waits from one whose gateway is lost."""
        clock = asyncio.get_running_loop().time
        while True:
            if (quiet_s := self._written_s + self._keep_alive_s - clock()) > 0:
                await asyncio.sleep(quiet_s)
            else:
                self._written_s = clock()
                await send(_body(b": waiting\n\n", more=True))

    async def _all_events(self) -> AsyncIterator[bytes]:
        accepted = self._accepted
        streams = {request.id: self._stream_of(request) for request in accepted.requests}
        if opening := b"".join(stream.opening() for stream in streams.values()):
            yield opening
        while len(self._ends) < len(streams):
            try:
                parts = await accepted.subscription.next()
            except UnknownRequest as error:
                yield next(iter(streams.values())).failure(api_error(error))
                return
            if parts is None:
                if self._drain.is_cut:
                    yield self._cut_event(streams)
                return
            for group in _write_groups(parts, streams) if accepted.options.echo else (parts,):
                events = await self._events(group, streams)
                # A client that resumes has the first events: they are not written again.
                if events:
                    yield events

    def _stream_of(self, request: Request) -> AnswerStream:
        if self._accepted.options.kind is AnswerKind.RESPONSE:
            last = int(self._accepted.cursor.get(request.choice, "-1"))
            return ResponseStream(request, self._accepted.options, self._render_model, starting_after=last)
        stream = ChoiceStream(request, self._accepted.options, self._render_model)
        last_event_id = self._accepted.cursor.get(request.choice)
        return stream if last_event_id is None else ResumedChoice(stream, last_event_id)

    async def _events(self, parts: Sequence[tuple[str, LogSlice]], streams: Mapping[str, AnswerStream]) -> bytes:
        events: list[bytes] = []
        tokens = 0
        for request_id, part in parts:
            stream = streams[request_id]
            if is_long(stream.tokens_to_echo):
                written = await in_thread(partial(_token_events, stream, part))
            else:
                written = _token_events(stream, part)
            tokens += len(written)
            events += written
            if part.end is not None:
                events.append(stream.end(part.end))
        self._record(parts, tokens)
        if len(self._ends) == len(streams):
            accepted = self._accepted
            details = [streams[request.id].details for request in accepted.requests]
            events.append(stream_end(accepted.requests, accepted.options, self._ends_in_order(), details))
        return b"".join(events)

    def _cut_event(self, streams: Mapping[str, AnswerStream]) -> bytes:
        """Return the last event of a stream that outlives this gateway."""
        error = draining_error()
        if not self._accepted.options.event_ids or self._accepted.options.kind is AnswerKind.RESPONSE:
            return next(iter(streams.values())).failure(error)
        return resume_event(error.body(), self._accepted.parent, [stream.last_event_id for stream in streams.values()])

    def _stream_headers(self) -> dict[str, str]:
        # `no-transform` and `x-accel-buffering` keep proxies from holding events back.
        return {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache, no-transform",
            "x-accel-buffering": "no",
            "x-request-id": self._accepted.parent,
        }


def _write_groups(
    parts: Sequence[tuple[str, LogSlice]], streams: Mapping[str, AnswerStream]
) -> Iterator[Sequence[tuple[str, LogSlice]]]:
    """Yield the parts of each write. A long prompt ends one: the client takes it before the next one is rendered."""
    group = []
    for request_id, part in parts:
        group.append((request_id, part))
        if is_long(streams[request_id].tokens_to_echo):
            yield group
            group = []
    if group:
        yield group


def _token_events(stream: AnswerStream, part: LogSlice) -> list[bytes]:
    """Return the events of a part's tokens that the client does not have."""
    return [event for event in map(stream.token, part.tokens) if event]


class WholeDelivery(Delivery):
    """Delivers one JSON answer when every choice has ended."""

    async def _deliver(self, scope: Scope, send: Send) -> None:  # noqa: ARG002 - a stream's signature
        accepted = self._accepted
        tokens: dict[str, list[Token]] = {request.id: [] for request in accepted.requests}
        while len(self._ends) < len(tokens):
            try:
                parts = await accepted.subscription.next()
            except UnknownRequest as error:
                return await self._send(send, *_error(api_error(error)))
            if parts is None:
                return await self._send(send, *_error(draining_error())) if self._drain.is_cut else None
            self._record(parts, sum(len(part.tokens) for _, part in parts))
            for request_id, part in parts:
                tokens[request_id].extend(part.tokens)
        for request, end in zip(accepted.requests, self._ends_in_order(), strict=True):
            if (failure := end_error(end, request, accepted.options.goals)) is not None:
                return await self._send(send, *_error(failure))
        logs = [(tokens[request.id], self._ends[request.id]) for request in accepted.requests]
        answer = await write_answer(accepted.requests, accepted.options, logs, self._render_model)
        return await self._send(send, 200, answer, {})

    async def _send(self, send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        fixed = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": self._accepted.parent,
        }
        await send(_start(status, {**fixed, **headers}))
        await send(_body(body, more=False))


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(error: ApiError) -> tuple[int, bytes, dict[str, str]]:
    return error.status, error.body(), error.headers()


def _start(status: int, headers: Mapping[str, str]) -> dict[str, object]:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


def _body(body: bytes, *, more: bool = False) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": more}
