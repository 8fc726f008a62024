"""A recording client: sends calls, waits after refusals, resumes broken streams, and records everything it receives."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import httpx

from checker.clients.sse import EventParser, RawEvent
from checker.clients.workload import PlannedCall
from checker.history.answers import DONE, WHOLE, parse_cursor, requested_choices
from checker.history.records import Answered, Closed, Event, HistoryWriter, Left, Refused, Sent

RETRY_S = 0.2
"""Pause after a connection that broke or could not be opened."""

ERROR_ENDS = frozenset({"model_replaced"})
"""Error codes of answers with a Retry-After that nevertheless mean that an accepted call failed."""


@dataclass(slots=True)
class CallProgress:
    """The state of one call."""

    plan: PlannedCall
    attempt: int = 0
    sent: int = -1  # last attempt that was recorded as sent
    connections: int = 0
    events_received: int = 0  # over all connections
    request_id: str | None = None
    gateway: str | None = None  # host:port of the gateway whose answer is being read
    last: dict[int, int] = field(default_factory=dict)  # last index of each choice
    ended: set[int] = field(default_factory=set)
    patience: asyncio.Timeout | None = None  # ends the call if no event comes for too long
    has_failed: bool = False  # a choice ended with an error, so no `[DONE]` will come
    is_over: bool = False
    drop_after: int | None = None

    def cursor(self, rewind: int = 0) -> str:
        """Return the Last-Event-ID: the last event of each choice, or some tokens earlier for a client that rewinds."""
        words = []
        for choice in range(requested_choices(self.plan.body)):
            last = self.last.get(choice, -1) - rewind
            if choice in self.ended and not rewind:
                words.append(f"{choice}.end")
            else:
                words.append(f"{choice}.{last if last >= 0 else 'start'}")
        return ",".join(words)

    def sent_record(self, at: float) -> Sent:
        """Return the record of sending the present attempt."""
        plan = self.plan
        return Sent(at=at, call=plan.name, attempt=self.attempt, path=plan.path, body=plan.body, intent=plan.intent)

    def restart_at(self, cursor: str) -> None:
        """Forget everything after a cursor: the events after it are new again."""
        self.last = {choice: last for choice, last in parse_cursor(cursor).items() if last is not None}
        self.ended = {choice for choice, last in parse_cursor(cursor).items() if last is None}

    def add(self, event: RawEvent) -> bool:
        """Add an event. Returns: True for a token."""
        self.events_received += 1
        choice, _, place = (event.id or "").partition(".")
        is_token = bool(place) and place != "end"
        if place == "end":
            self.ended.add(int(choice))
        elif is_token:
            self.last[int(choice)] = int(place)
        # An error without an id ends the call. An error of one choice leaves the other choices running.
        is_error = _error_code(event.data.encode()) is not None
        self.has_failed = self.has_failed or is_error
        has_all_ends = len(self.ended) == requested_choices(self.plan.body)
        is_end_without_done = self.has_failed and (has_all_ends or (is_error and not place))
        self.is_over = event.data == DONE or is_end_without_done
        return is_token


class Client:
    """Makes any number of concurrent calls. The gateways take turns, so that a resumed stream continues at another."""

    def __init__(
        self,
        urls: Sequence[str],
        http: httpx.AsyncClient,
        history: HistoryWriter,
        *,
        seed: int,
        can_resume: bool,
        patience_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            can_resume: the server has `/v1/requests/{id}/events`; without it, the client gives up a broken stream.
            patience_s: the client gives up a call after this time without an event. It is long, because on a shared
                machine a stage needs minutes to start again.
        """
        self._urls = cycle(urls)
        self._http = http
        self._history = history
        self._key_prefix = f"checker-{seed}-{random.getrandbits(32):08x}"
        self._can_resume = can_resume
        self._patience_s = patience_s
        self._clock = clock
        self._calls: dict[str, CallProgress] = {}
        self.tokens_received = 0

    @property
    def open_calls(self) -> int:
        """Number of calls that have started and are not over."""
        return len(self._calls)

    def in_flight(self, gateways: Collection[str] = ()) -> tuple[str, ...]:
        """Return the calls that are accepted and not over; with gateways (host:port), only those that one answers."""
        return tuple(
            name
            for name, progress in self._calls.items()
            if progress.request_id is not None and (not gateways or progress.gateway in gateways)
        )

    def waits_for_door(self, is_meant: Callable[[PlannedCall], bool]) -> bool:
        """Is there such a call that is neither accepted nor over?"""
        return any(progress.request_id is None and is_meant(progress.plan) for progress in self._calls.values())

    def idempotency_key(self, progress: CallProgress) -> str:
        """Return the Idempotency-Key of the last attempt, which is the accepted one if the call is accepted."""
        return f"{self._key_prefix}-{progress.plan.name}-{progress.attempt}"

    async def call(self, plan: PlannedCall) -> CallProgress:
        """Make one call and wait for its end, of any kind."""
        progress = self._calls[plan.name] = CallProgress(plan, drop_after=plan.drop_after)
        try:
            async with asyncio.timeout(self._patience_s) as progress.patience:
                await self._run(progress)
        except TimeoutError:
            self._leave(progress, f"no event for {self._patience_s:g} s")
        finally:
            del self._calls[plan.name]
        return progress

    async def _run(self, progress: CallProgress) -> None:
        plan = progress.plan
        while not progress.is_over:
            self._record_sent(progress)
            number, progress.connections = progress.connections, progress.connections + 1
            error: str | None = None
            try:
                pause_s = await self._connect(progress, number)
            except (httpx.HTTPError, httpx.StreamError) as failure:
                error, pause_s = repr(failure), RETRY_S
            self._history.add(Closed(at=self._clock(), call=plan.name, connection=number, error=error))
            if not progress.is_over:
                await asyncio.sleep(pause_s)

    def _record_sent(self, progress: CallProgress) -> None:
        """Record an attempt, once."""
        if progress.sent != progress.attempt:
            progress.sent = progress.attempt
            self._history.add(progress.sent_record(self._clock()))

    async def _connect(self, progress: CallProgress, number: int) -> float:
        """Make one HTTP call: the POST until it is answered, then the resumption. Returns: a pause before the next."""
        url, plan, headers = next(self._urls), progress.plan, {"accept": "text/event-stream"}
        if progress.request_id is None or not plan.body.get("stream"):
            headers |= {"idempotency-key": self.idempotency_key(progress), **plan.headers}
            request = self._http.build_request("POST", url + plan.path, json=plan.body, headers=headers)
            return await self._exchange(progress, number, request, cursor=None)
        if not self._can_resume:
            self._leave(progress, "the stream broke and the server has no way to resume it")
            return 0.0
        cursor = progress.cursor(plan.rewind)
        headers |= {"last-event-id": cursor} if cursor else {}
        request = self._http.build_request("GET", f"{url}/v1/requests/{progress.request_id}/events", headers=headers)
        return await self._exchange(progress, number, request, cursor=cursor)

    async def _exchange(
        self, progress: CallProgress, number: int, request: httpx.Request, *, cursor: str | None
    ) -> float:
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code in (429, 503) and "retry-after" in response.headers:
                code = _error_code(await response.aread())
                if code not in ERROR_ENDS:
                    if cursor is None and "x-request-id" in response.headers:
                        # The call was accepted before this connection broke: the same key returns the same generation.
                        progress.request_id = response.headers["x-request-id"]
                        return float(response.headers["retry-after"])
                    return self._record_refused(progress, response, code)
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            self._record_answered(progress, number, response, cursor)
            progress.gateway = response.url.netloc.decode()
            if is_stream:
                await self._read_stream(progress, number, response)
            else:
                text = (await response.aread()).decode()
                self._record_event(progress, number, RawEvent(WHOLE, text))
                progress.is_over = True
        finally:
            progress.gateway = None
            await response.aclose()
        return RETRY_S

    def _record_answered(
        self, progress: CallProgress, number: int, response: httpx.Response, cursor: str | None
    ) -> None:
        # An accepted call has a request id, even if it ended with an error.
        request_id = response.headers.get("x-request-id")
        progress.request_id = progress.request_id or request_id
        self._history.add(
            Answered(
                at=self._clock(),
                call=progress.plan.name,
                connection=number,
                status=response.status_code,
                request_id=request_id,
                cursor=cursor,
            )
        )
        if cursor is not None:
            progress.restart_at(cursor)

    def _record_refused(self, progress: CallProgress, response: httpx.Response, code: str | None) -> float:
        pause_s = float(response.headers["retry-after"])
        if progress.request_id is not None:
            # An accepted call keeps its key, also while no gateway reaches the pool.
            return pause_s
        self._history.add(
            Refused(
                at=self._clock(),
                call=progress.plan.name,
                attempt=progress.attempt,
                status=response.status_code,
                code=code,
                retry_after_s=pause_s,
            )
        )
        progress.attempt += 1
        return pause_s

    async def _read_stream(self, progress: CallProgress, number: int, response: httpx.Response) -> None:
        parser, plan = EventParser(), progress.plan
        async for chunk in response.aiter_raw():
            for event in parser.feed(chunk):
                if _resume_cursor(event) == progress.cursor():
                    raise httpx.ReadError("the gateway ends and has named the cursor to resume at")
                self._record_event(progress, number, event)
                if plan.leave_after is not None and progress.events_received >= plan.leave_after:
                    await self._cancel(progress)
                    self._leave(progress, "cancel")
                if progress.is_over:
                    return
                drop_after = progress.drop_after
                if drop_after is not None and progress.events_received >= drop_after and self._can_resume:
                    progress.drop_after = None
                    return

    def _record_event(self, progress: CallProgress, number: int, event: RawEvent) -> None:
        name = progress.plan.name
        self._history.add(Event(at=self._clock(), call=name, connection=number, id=event.id, data=event.data))
        if progress.patience is not None:
            progress.patience.reschedule(asyncio.get_running_loop().time() + self._patience_s)
        self.tokens_received += progress.add(event)

    async def _cancel(self, progress: CallProgress) -> None:
        """Send one cancel; if it is lost, the client has left without a cancel."""
        if progress.plan.sends_cancel:
            with contextlib.suppress(httpx.HTTPError):
                await self._http.delete(f"{next(self._urls)}/v1/requests/{progress.request_id}")

    def _leave(self, progress: CallProgress, reason: str) -> None:
        self._history.add(Left(at=self._clock(), call=progress.plan.name, reason=reason))
        progress.is_over = True


def _resume_cursor(event: RawEvent) -> str | None:
    """Return the cursor that a gateway names before it ends; None for any other event.

    A wrong cursor makes the event an error like all others.
    """
    try:
        return ",".join(json.loads(event.data)["resume"]["last_event_ids"])
    except (ValueError, KeyError, TypeError):
        return None


def _error_code(body: bytes) -> str | None:
    """Return the code, or the type, of an error answer; None for any other answer."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
