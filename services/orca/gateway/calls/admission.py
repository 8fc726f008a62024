"""Refuses new calls for load, for a deadline that cannot be met, and for the rate and the priorities of their key.

A call that repeats an accepted one under its Idempotency-Key takes no place, so it passes. Only a call that would be
refused is looked up in the pool.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from orca.core.api_keys import ApiKey
from orca.core.domain.errors import QueueFull, UnknownRequest
from orca.core.domain.request import Request
from orca.gateway.errors import ApiError
from orca.gateway.gateway import Gateway
from orca.gateway.latency_goals import DEADLINE_FIELD, TPOT_HEADER, TTFT_HEADER, LatencyGoals
from orca.gateway.limits.overload import SHORTEST
from orca.pool.api import RequestPool
from orca.pool.order.order_class import DeadlineKind, OrderClass, class_of


async def check_load(gateway: Gateway, key: ApiKey | None, name: str | None) -> None:
    """Raise unless there is a place for a new call.

    Args:
        name: the id that the call's Idempotency-Key stands for; None without such a key.
    Raises: QueueFull, ApiError 503.
    """
    async with _unless_stored(gateway.pool, name):
        gateway.overload.check_answers(gateway.drain.open_answers)
        await gateway.overload.check(None if key is None else key.limits.queue_percent)


async def check_deadlines(
    gateway: Gateway, deadline_ms: int | None, goals: LatencyGoals, priority: int, name: str | None
) -> None:
    """Raise for a call that would miss its deadline while it still waits, before its lengths are known.

    Args:
        priority: of the call.
        name: as for `check_load`.
    Raises: ApiError 429.
    """
    asked = {DEADLINE_FIELD: deadline_ms, TTFT_HEADER: goals.first_token_deadline_ms}
    async with _unless_stored(gateway.pool, name):
        _check_soonest(gateway, asked, SHORTEST._replace(priority=priority))


def check_requests(gateway: Gateway, requests: Sequence[Request], deadline_ms: int | None) -> None:
    """Raise for a call that would miss its deadline, now that its lengths are known.

    Where claims go by arrival, lengths do not matter, and nothing is left to check.
    Args: deadline_ms: in the body of the call; enforced goals may make it sooner.
    Raises: ApiError 429.
    """
    stats = gateway.overload.backlog.stats
    if stats is None or stats.by_order is None:
        return
    for request in requests:
        end = DEADLINE_FIELD if request.deadline_ms == deadline_ms else TPOT_HEADER
        asked = {end: request.deadline_ms, TTFT_HEADER: request.first_token_deadline_ms}
        for kind, (param, ms) in zip((DeadlineKind.END, DeadlineKind.FIRST_TOKEN), asked.items(), strict=True):
            if ms is not None:
                gateway.overload.check_run_time(request, kind, ms, param)
    # Requests of one class wait alike. All requests of a call have the same deadlines, unless goals bound their ends.
    for of, request in {class_of(request, DeadlineKind.END): request for request in requests}.items():
        _check_soonest(gateway, {DEADLINE_FIELD: deadline_ms, TTFT_HEADER: request.first_token_deadline_ms}, of)


def _check_soonest(gateway: Gateway, asked: Mapping[str, int | None], of: OrderClass) -> None:
    """Check the soonest deadline of a request: if that can be met, the request does not wait for the others either."""
    deadlines = [(ms, param) for param, ms in asked.items() if ms is not None]
    if deadlines:
        gateway.overload.check_deadline(*min(deadlines, key=lambda each: each[0]), of)


async def check_priority(gateway: Gateway, key: ApiKey | None, priority: int | None, name: str | None) -> None:
    """Raise for a priority that is more urgent than the key allows. Without keys, nothing is bounded.

    Args:
        priority: in the body of the call; None if it names none.
        name: as for `check_load`.
    Raises: ApiError 400.
    """
    if key is None or priority is None or priority >= key.limits.priority_bound:
        return
    async with _unless_stored(gateway.pool, name):
        message = (
            f"priority: {priority} is more urgent than this API key allows; its most urgent priority is "
            f"{key.limits.priority_bound}"
        )
        raise ApiError(400, message, param="priority", code="priority_not_allowed")


async def take_rest_from_rate(
    gateway: Gateway, key: ApiKey | None, name: str | None, *, prompts: int, choices: int
) -> None:
    """Count all requests of a call but the first against its key's rate; the first was counted when the key let it in.

    Args: name: as for `check_load`.
    Raises: ApiError 429, 400.
    """
    if key is None or prompts * choices == 1:
        return
    async with _unless_stored(gateway.pool, name):
        gateway.keys.take_further(key, prompts * choices, param="n" if choices > 1 else "prompt")


@contextlib.asynccontextmanager
async def _unless_stored(pool: RequestPool, name: str | None) -> AsyncIterator[None]:
    """Pass over a refusal if the pool has a request of this name: then the call repeats one that was accepted."""
    try:
        yield
    except (QueueFull, ApiError):
        if name is None or not await is_stored(pool, name):
            raise


async def is_stored(pool: RequestPool, parent: str) -> bool:
    """Return whether the pool has a call of this name. Raises: PoolUnavailable."""
    try:
        await pool.parent(parent)
    except UnknownRequest:
        return False
    return True
