"""Opens a call: reads everything from its HTTP request but the body, once.

Later functions see the `OpenedCall` and never the HTTP request.
"""

import time
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from orca.core.api_keys import ApiKey
from orca.core.priority import DEFAULT_PRIORITY
from orca.gateway.calls.admission import check_load
from orca.gateway.calls.idempotency import keyed_name, read_idempotency_key
from orca.gateway.gateway import Gateway
from orca.gateway.latency_goals import NO_GOALS, LatencyGoals, read_goals
from orca.gateway.limits.auth import key_of, owner_of
from orca.gateway.render.cursor import ResumePosition, read_position


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCall:
    """A call before its body: its maker, and the requests of its path and headers."""

    started: float  # on the clock of `time.perf_counter`
    path: str
    key: ApiKey | None  # the API key that let the call in; None if there are no keys
    owner: str  # names the key in stored requests and does not reveal it; empty if there are no keys
    position: ResumePosition  # the events that the client has; the start of the stream unless it resumes one
    # Calls that generate.
    keyed_name: str | None = None  # the id that owner and Idempotency-Key stand for; None without such a key
    goals: LatencyGoals = NO_GOALS
    wants_event_ids: bool = False  # `Accept` names event streams
    prefers_async: bool = False  # `Prefer: respond-async`: answer 202 before the work is done
    traceparent: str | None = None  # W3C trace context as the client sent it, well-formed or not

    def priority(self, asked: int | None) -> int:
        """Return the priority of the call.

        Args: asked: in its body; None stands for the default, or for the bound of its key if that is less urgent.
        """
        if asked is not None:
            return asked
        return DEFAULT_PRIORITY if self.key is None else max(DEFAULT_PRIORITY, self.key.limits.priority_bound)


def open_call(http: HttpRequest) -> OpenedCall:
    """Open a call that reads a stored request, or cancels it."""
    key = key_of(http.scope)
    return OpenedCall(
        started=time.perf_counter(),
        path=http.scope["path"],
        key=key,
        owner=owner_of(key),
        position=read_position(http.headers, http.query_params),
    )


async def open_generation(gateway: Gateway, http: HttpRequest) -> OpenedCall:
    """Open a call that generates, unless the gateway drains or has no place for it. The body stays unread.

    Raises: ApiError, QueueFull, InvalidRequest.
    """
    gateway.drain.check()
    started = time.perf_counter()
    headers, key = http.headers, key_of(http.scope)
    owner, idempotency_key = owner_of(key), read_idempotency_key(headers)
    name = None if idempotency_key is None else keyed_name(owner, idempotency_key)
    await check_load(gateway, key, name)
    return OpenedCall(
        started=started,
        path=http.scope["path"],
        key=key,
        owner=owner,
        position=ResumePosition(),
        keyed_name=name,
        goals=read_goals(headers, is_enforced=gateway.settings.slo_enforce),
        wants_event_ids="text/event-stream" in headers.get("accept", ""),
        prefers_async=_prefers_async(headers),
        traceparent=headers.get("traceparent"),
    )


def _prefers_async(headers: Headers) -> bool:
    """Return whether the client asks to be answered before the work is done (RFC 7240)."""
    preferences = ",".join(headers.getlist("prefer")).lower().split(",")
    return any(preference.partition(";")[0].strip() == "respond-async" for preference in preferences)
