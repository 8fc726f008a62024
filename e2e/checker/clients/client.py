"""A client that records: sends calls, waits out refusals, resumes broken streams, and notes all that it was told."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import httpx

from checker.clients.sse import EventCutter, RawEvent
from checker.clients.workload import PlannedCall
from checker.history.answers import DONE, WHOLE, choices_asked, parse_cursor
from checker.history.records import Answered, Closed, Event, HistoryWriter, Left, Refused, Sent

RETRY_S = 0.2
"""Pause after a connection that broke or was not to be had."""

ERROR_ENDS = frozenset({"model_replaced"})
"""Codes of answers that have a Retry-After and still say that an accepted call failed."""


@dataclass(slots=True)
class Journey:
    """Where one call stands."""

    plan: PlannedCall
    attempt: int = 0
    sent: int = -1  # last attempt that was noted as sent
    connections: int = 0
    heard: int = 0  # events, over all connections
    request_id: str | None = None
    gateway: str | None = None  # whose answer is being read, as host:port
    last: dict[int, int] = field(default_factory=dict)  # last index of each choice
    ended: set[int] = field(default_factory=set)
    patience: asyncio.Timeout | None = None  # ends the call when nothing is heard for too long
    has_failed: bool = False  # a choice ended with an error, so no `[DONE]` will come
    is_over: bool = False
    drop_after: int | None = None

    def cursor(self, rewind: int = 0) -> str:
        """Last-Event-ID: the last event of each choice, some tokens earlier for a client that rewinds."""
        words = []
        for choice in range(choices_asked(self.plan.body)):
            last = self.last.get(choice, -1) - rewind
            if choice in self.ended and not rewind:
                words.append(f"{choice}.end")
            else:
                words.append(f"{choice}.{last if last >= 0 else 'start'}")
        return ",".join(words)


class Client:
    """Any number of calls at a time; the gateways take turns, so a resumed stream goes on at another one."""

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
            can_resume: the server has `/v1/requests/{id}/events`; without it a broken stream is given up.
            patience_s: without an event, then a call is given up. Long: where many share a machine a stage takes
                minutes to start again.
        """
        self._urls = cycle(urls)
        self._http = http
        self._history = history
        self._key_prefix = f"checker-{seed}-{random.getrandbits(32):08x}"
        self._can_resume = can_resume
        self._patience_s = patience_s
        self._clock = clock
        self._journeys: dict[str, Journey] = {}
        self.tokens_heard = 0

    @property
    def calls_open(self) -> int:
        """Calls that were begun and are not over."""
        return len(self._journeys)

    def in_flight(self, gateways: Collection[str] = ()) -> tuple[str, ...]:
        """Calls whose headers came and whose end did not; with gateways (host:port), those that one of them answers."""
        return tuple(
            name
            for name, journey in self._journeys.items()
            if journey.request_id is not None and (not gateways or journey.gateway in gateways)
        )

    def key_of(self, journey: Journey) -> str:
        """Idempotency-Key of its last attempt: the accepted one, when it was accepted."""
        return f"{self._key_prefix}-{journey.plan.name}-{journey.attempt}"

    async def call(self, plan: PlannedCall) -> Journey:
        """Make one call to its end, whatever that is."""
        journey = self._journeys[plan.name] = Journey(plan, drop_after=plan.drop_after)
        try:
            async with asyncio.timeout(self._patience_s) as journey.patience:
                await self._go(journey)
        except TimeoutError:
            self._leave(journey, f"nothing heard for {self._patience_s:g} s")
        finally:
            del self._journeys[plan.name]
        return journey

    async def _go(self, journey: Journey) -> None:
        plan = journey.plan
        while not journey.is_over:
            self._send(journey)
            number, journey.connections = journey.connections, journey.connections + 1
            error: str | None = None
            try:
                pause_s = await self._connect(journey, number)
            except (httpx.HTTPError, httpx.StreamError) as failure:
                error, pause_s = repr(failure), RETRY_S
            self._history.add(Closed(at=self._clock(), call=plan.name, connection=number, error=error))
            if not journey.is_over:
                await asyncio.sleep(pause_s)

    def _send(self, journey: Journey) -> None:
        """Note an attempt, once."""
        plan = journey.plan
        if journey.sent == journey.attempt:
            return
        journey.sent = journey.attempt
        self._history.add(
            Sent(
                at=self._clock(),
                call=plan.name,
                attempt=journey.attempt,
                path=plan.path,
                body=plan.body,
                intent=plan.intent,
            )
        )

    async def _connect(self, journey: Journey, number: int) -> float:
        """One HTTP call: the POST until it was answered, the resumption then. Returns: a pause before the next."""
        url, headers = next(self._urls), {"accept": "text/event-stream"}
        if journey.request_id is None or not journey.plan.body.get("stream"):
            headers |= {"idempotency-key": self.key_of(journey), **journey.plan.headers}
            request = self._http.build_request("POST", url + journey.plan.path, json=journey.plan.body, headers=headers)
            return await self._exchange(journey, number, request, cursor=None)
        if not self._can_resume:
            self._leave(journey, "the stream broke and the server has no way to resume it")
            return 0.0
        cursor = journey.cursor(journey.plan.rewind)
        headers |= {"last-event-id": cursor} if cursor else {}
        request = self._http.build_request("GET", f"{url}/v1/requests/{journey.request_id}/events", headers=headers)
        return await self._exchange(journey, number, request, cursor=cursor)

    async def _exchange(self, journey: Journey, number: int, request: httpx.Request, *, cursor: str | None) -> float:
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code in (429, 503) and "retry-after" in response.headers:
                body = await response.aread()
                if _code(body) not in ERROR_ENDS:
                    if cursor is None and "x-request-id" in response.headers:
                        # Accepted, and then this connection was cut: the same key asks for the same generation.
                        journey.request_id = response.headers["x-request-id"]
                        return float(response.headers["retry-after"])
                    return self._refused(journey, response, _code(body), is_resuming=cursor is not None)
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            self._answered(journey, number, response, cursor)
            journey.gateway = response.url.netloc.decode()
            if is_stream:
                await self._read_stream(journey, number, response)
            else:
                text = (await response.aread()).decode()
                self._note(journey, number, RawEvent(WHOLE, text))
                journey.is_over = True
        finally:
            journey.gateway = None
            await response.aclose()
        return RETRY_S

    def _answered(self, journey: Journey, number: int, response: httpx.Response, cursor: str | None) -> None:
        # An accepted call has a name, also one that ended with an error.
        request_id = response.headers.get("x-request-id")
        journey.request_id = journey.request_id or request_id
        self._history.add(
            Answered(
                at=self._clock(),
                call=journey.plan.name,
                connection=number,
                status=response.status_code,
                request_id=request_id,
                cursor=cursor,
            )
        )
        if cursor is not None:
            # What it is told again is new to it.
            journey.last = {choice: last for choice, last in parse_cursor(cursor).items() if last is not None}
            journey.ended = {choice for choice, last in parse_cursor(cursor).items() if last is None}

    def _refused(self, journey: Journey, response: httpx.Response, code: str | None, *, is_resuming: bool) -> float:
        pause_s = float(response.headers["retry-after"])
        if is_resuming:
            return pause_s
        at, name = self._clock(), journey.plan.name
        self._history.add(
            Refused(
                at=at,
                call=name,
                attempt=journey.attempt,
                status=response.status_code,
                code=code,
                retry_after_s=pause_s,
            )
        )
        journey.attempt += 1
        return pause_s

    async def _read_stream(self, journey: Journey, number: int, response: httpx.Response) -> None:
        cutter = EventCutter()
        async for chunk in response.aiter_raw():
            for event in cutter.feed(chunk):
                if _resumes_at(event) == journey.cursor():
                    raise httpx.ReadError("the gateway goes, and said where to go on")
                self._note(journey, number, event)
                if journey.plan.leave_after is not None and journey.heard >= journey.plan.leave_after:
                    await self._cancel(journey)
                    self._leave(journey, "cancel")
                if journey.is_over:
                    return
                if journey.drop_after is not None and journey.heard >= journey.drop_after and self._can_resume:
                    journey.drop_after = None
                    return

    def _note(self, journey: Journey, number: int, event: RawEvent) -> None:
        name = journey.plan.name
        self._history.add(Event(at=self._clock(), call=name, connection=number, id=event.id, data=event.data))
        journey.heard += 1
        if journey.patience is not None:
            journey.patience.reschedule(asyncio.get_running_loop().time() + self._patience_s)
        choice, _, place = (event.id or "").partition(".")
        if place == "end":
            journey.ended.add(int(choice))
        elif place:
            journey.last[int(choice)] = int(place)
            self.tokens_heard += 1
        # An error without an id ends the call; that of a choice leaves the others to their ends.
        is_error = _code(event.data.encode()) is not None
        journey.has_failed = journey.has_failed or is_error
        has_all_ends = len(journey.ended) == choices_asked(journey.plan.body)
        is_end_without_done = journey.has_failed and (has_all_ends or (is_error and not place))
        journey.is_over = event.data == DONE or is_end_without_done

    async def _cancel(self, journey: Journey) -> None:
        """Said once: a cancel that is lost is a client that went without a word."""
        if journey.plan.says_cancel:
            with contextlib.suppress(httpx.HTTPError):
                await self._http.delete(f"{next(self._urls)}/v1/requests/{journey.request_id}")

    def _leave(self, journey: Journey, reason: str) -> None:
        self._history.add(Left(at=self._clock(), call=journey.plan.name, reason=reason))
        journey.is_over = True


def _resumes_at(event: RawEvent) -> str | None:
    """The cursor that a gateway names before it goes; None for all else. A wrong one is an error like others."""
    try:
        return ",".join(json.loads(event.data)["resume"]["last_event_ids"])
    except (ValueError, KeyError, TypeError):
        return None


def _code(body: bytes) -> str | None:
    """Code, or type, of an error answer; None for all else."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
