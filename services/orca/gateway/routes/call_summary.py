"""What is told of a call when its connection is over: which goals were met, and its span."""

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
from orca.pool.records import RequestStatus

log = logging.getLogger(__name__)


def summarize_call(
    gateway: Gateway, accepted: AcceptedCall, ends: Mapping[str, End], span: CallSpan | None = None
) -> None:
    """A connection is over: judge the goals that are its to judge, and export the call's span.

    Args: ends: those that went out, by request; a client that left has not seen them all.
    """
    traced = span if span is not None and span.span is not None else None
    if traced is None and not accepted.options.goals.named:
        return
    gateway.finish(_summarize(gateway, accepted, dict(ends), traced))


async def _summarize(gateway: Gateway, accepted: AcceptedCall, ends: Mapping[str, End], span: CallSpan | None) -> None:
    """Tell what only the pool has: when requests were claimed, had their first token, and ended."""
    waited_ms = (time.perf_counter() - accepted.timing.started) * 1000
    goals = accepted.options.goals
    asked = accepted.requests if goals.named else accepted.requests[:1]
    try:
        found = await asyncio.gather(*(gateway.pool.status(request.id) for request in asked))
    except OrcaError as error:
        log.info("no times of a call: %s", error, extra={"request_id": accepted.parent})
        found = []
    statuses = {status.request.id: status for status in found}
    for status in statuses.values():
        _count_goals(gateway, accepted, ends, status, waited_ms)
    said = summary(goals, statuses)
    if said:
        log.info("goals judged", extra={"request_id": accepted.parent, **said})
    if span is not None:
        attributes: dict[str, str | int | float] = {
            "orca.request_id": accepted.parent,
            "gen_ai.request.model": accepted.options.model,
            "gen_ai.usage.output_tokens": sum(end.count for end in ends.values()),
            "orca.choices_unseen": len(accepted.requests) - len(ends),
            **{f"orca.{name}": value for name, value in said.items()},
        }
        first_claimed_ms = found[0].first_claimed_ms if found else None
        gateway.tracing.finish(span, accepted.timing, attributes, first_claimed_ms)


def _count_goals(
    gateway: Gateway, accepted: AcceptedCall, ends: Mapping[str, End], status: RequestStatus, waited_ms: float
) -> None:
    """Once for a request: the first token by the connection that made the call, the rest by the one that saw the end.

    A client that leaves before its first token would otherwise be missed out, and those leave that wait longest.
    """
    request_id = status.request.id
    is_ours = {
        Goal.TTFT: not accepted.is_resumed,
        Goal.TPOT: request_id in ends and request_id not in accepted.ended_before,
    }
    for goal, outcome in judge(accepted.options.goals, status, waited_ms).items():
        if is_ours[goal]:
            gateway.metrics.count_goal(goal, outcome)
