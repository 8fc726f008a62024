"""Reports on a call when its connection is over: the outcomes of its goals and deadlines, and its span."""

import asyncio
import logging
import time
from collections.abc import Mapping

from orca.core.domain.errors import OrcaError
from orca.core.domain.request import End
from orca.gateway.answer.delivery import AcceptedCall
from orca.gateway.answer.tracing import CallSpan
from orca.gateway.gateway import Gateway
from orca.gateway.latency_goals import Goal, judge, summary
from orca.pool.order.deadline_outcome import deadline_outcome
from orca.pool.records import RequestStatus

log = logging.getLogger(__name__)


def summarize_call(
    gateway: Gateway, accepted: AcceptedCall, ends: Mapping[str, End], span: CallSpan | None = None
) -> None:
    """Judge the goals and the deadlines that this connection decides, and export the call's span, in the background.

    Args: ends: those that were sent, by request; a client that left has not seen them all.
    """
    traced = span if span is not None and span.span is not None else None
    if traced is None and not accepted.options.goals.named and not _have_deadlines(accepted):
        return
    gateway.finish(_summarize(gateway, accepted, dict(ends), traced))


def _have_deadlines(accepted: AcceptedCall) -> bool:
    """Return whether the requests of a call have deadlines: all of them have, or none."""
    return accepted.requests[0].first_deadline_wall_ms is not None


async def _summarize(gateway: Gateway, accepted: AcceptedCall, ends: Mapping[str, End], span: CallSpan | None) -> None:
    """Read from the pool when requests were claimed, had their first token and ended, and report it."""
    waited_ms = (time.perf_counter() - accepted.timing.started) * 1000
    goals = accepted.options.goals
    requests = accepted.requests if goals.named or _have_deadlines(accepted) else accepted.requests[:1]
    try:
        found = await asyncio.gather(*(gateway.pool.status(request.id) for request in requests))
    except OrcaError as error:
        log.info("the pool has no times of a call: %s", error, extra={"request_id": accepted.parent})
        found = []
    statuses = {status.request.id: status for status in found}
    for status in statuses.values():
        _count_goals(gateway, accepted, ends, status, waited_ms)
        _count_deadline(gateway, accepted, ends, status)
    fields = summary(goals, statuses)
    if fields:
        log.info("goals judged", extra={"request_id": accepted.parent, **fields})
    if span is not None:
        attributes: dict[str, str | int | float] = {
            "orca.request_id": accepted.parent,
            "gen_ai.request.model": accepted.options.model,
            "gen_ai.usage.output_tokens": sum(end.count for end in ends.values()),
            "orca.choices_unseen": len(accepted.requests) - len(ends),
            **{f"orca.{name}": value for name, value in fields.items()},
        }
        if (cached := _cached_tokens(accepted)) is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = cached
        first_claimed_ms = found[0].first_claimed_ms if found else None
        gateway.tracing.finish(span, accepted.timing, attributes, first_claimed_ms)


def _cached_tokens(accepted: AcceptedCall) -> int | None:
    """Return the prompt tokens that were not computed, counted as in the answer's usage; None if they are not known."""
    firsts = accepted.requests[:: accepted.options.choices_per_prompt]
    known = [accepted.cached_tokens[request.id] for request in firsts if request.id in accepted.cached_tokens]
    return sum(known) if known else None


def _count_goals(
    gateway: Gateway, accepted: AcceptedCall, ends: Mapping[str, End], status: RequestStatus, waited_ms: float
) -> None:
    """Count each goal once: ttft by the connection that made the call, tpot by the one that saw the end.

    Otherwise clients that leave before their first token would not count, and those wait longest.
    """
    request_id = status.request.id
    is_decided_here = {
        Goal.TTFT: not accepted.is_resumed,
        Goal.TPOT: request_id in ends and request_id not in accepted.ended_before,
    }
    for goal, outcome in judge(accepted.options.goals, status, waited_ms).items():
        if is_decided_here[goal]:
            gateway.metrics.count_goal(goal, outcome)


def _count_deadline(gateway: Gateway, accepted: AcceptedCall, ends: Mapping[str, End], status: RequestStatus) -> None:
    """Count the outcome of a deadline by each connection that saw the end and has not begun after it.

    A call that is repeated under its idempotency key counts again, as its usage does.
    """
    request = status.request
    outcome = deadline_outcome(status)
    if outcome is not None and request.id in ends and request.id not in accepted.ended_before:
        gateway.metrics.count_deadline(outcome, 1.0 if request.weight is None else request.weight)
