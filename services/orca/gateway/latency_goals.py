"""Latency goals of a call: the headers `x-slo-ttft-ms` and `x-slo-tpot-ms`, as benchmark clients send them.

Each has a second name with the prefix that llm-d gives its headers.

ttft    time to first token: from the submission of a request until its first token is committed
tpot    time per output token: the mean after the first token, (last token - first token) / (tokens - 1)

Both are measured by the pool's clock, so that all gateways give the same judgement. A time that equals the goal meets
it. The gap between two single tokens (ITL) is another goal: no client has a header for it, and the pool keeps no times.

Goals are soft: a request is judged by them, and its state, the log, spans and metrics report the judgement. They end
nothing. They never change an answer's bytes, which must be the same from any gateway.

Where groups claim by another order than arrival, a soft ttft goal also orders claims, while it can be met (pool/order).
A tpot goal alone does not, since it does not say when a request must start.

With the setting `slo_enforce` they become deadlines of the pool, which ends a request as `deadline_exceeded`:

- with a ttft goal, if the request has no token by then;
- with both goals, if it has not ended after ttft + (max_new_tokens - 1) x tpot. Only then a goal is certainly missed:
  until that moment the remaining tokens might still come fast enough. So every request that is ended has missed a goal,
  but not every request that misses one is ended: an answer may be slow and short.

A tpot goal alone sets no deadline, since it does not say when the first token is due.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from starlette.datastructures import Headers

from orca.core.domain.errors import InvalidRequest
from orca.core.domain.request import FinishReason, Request
from orca.pool.records import RequestStatus

TTFT_HEADER, TPOT_HEADER, DEADLINE_FIELD = "x-slo-ttft-ms", "x-slo-tpot-ms", "deadline_ms"
OTHER_NAMES = {TTFT_HEADER: "x-llm-d-slo-ttft-ms", TPOT_HEADER: "x-llm-d-slo-tpot-ms"}
MS_MAX = 2**31
_NUMBER = re.compile(r"\d{1,10}(\.\d{1,9})?")
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Goal(StrEnum):
    TTFT = "ttft"
    TPOT = "tpot"


class GoalOutcome(StrEnum):
    MET = "met"
    MISSED = "missed"


@dataclass(frozen=True, slots=True)
class AskedDeadline:
    """A deadline of a request, and the field or header that asked for it."""

    param: str
    ms: int  # from submission
    event: str  # that must happen by then
    also: str | None = None  # another header, if the time is that of both

    def __str__(self) -> str:
        asking = self.param if self.also is None else f"{self.also} and {self.param}"
        return f"{asking} allowed {self.ms} ms until the {self.event}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyGoals:
    """The goals that a call has for each of its requests, in milliseconds; None for no goal."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    is_enforced: bool = False

    @property
    def named(self) -> dict[Goal, float]:
        """The goals that are set."""
        goals = {Goal.TTFT: self.ttft_ms, Goal.TPOT: self.tpot_ms}
        return {goal: ms for goal, ms in goals.items() if ms is not None}

    @property
    def first_token_deadline_ms(self) -> int | None:
        """The deadline for the first token of each request, from its submission."""
        return math.ceil(self.ttft_ms) if self.is_enforced and self.ttft_ms is not None else None

    @property
    def first_token_goal_ms(self) -> int | None:
        """The time from the submission of each request in which its first token should come; None if it must."""
        return None if self.is_enforced or self.ttft_ms is None else math.ceil(self.ttft_ms)

    def deadline_ms(self, asked_ms: int | None, max_new_tokens: int) -> int | None:
        """Return the sooner of the call's own deadline and the limit of both goals, from submission."""
        if not self.is_enforced or self.ttft_ms is None or self.tpot_ms is None:
            return asked_ms
        bound_ms = math.ceil(self.ttft_ms + (max_new_tokens - 1) * self.tpot_ms)
        return bound_ms if asked_ms is None else min(asked_ms, bound_ms)

    def deadline_in_force(self, request: Request, tokens: int) -> AskedDeadline | None:
        """Return the deadline that ends a request of a call with these goals; None if it has none.

        Args: tokens: that the request has. With the first one, the deadline for it is met.
        """
        first_ms, end_ms = request.first_token_deadline_ms, request.deadline_ms
        if not tokens and first_ms is not None and (end_ms is None or first_ms <= end_ms):
            return AskedDeadline(TTFT_HEADER, first_ms, "first token")
        if end_ms is None:
            return None
        # The pool keeps the sooner one of the goals' bound and `deadline_ms`.
        if end_ms == self.deadline_ms(None, request.max_new_tokens):
            return AskedDeadline(TPOT_HEADER, end_ms, "end", also=TTFT_HEADER)
        return AskedDeadline(DEADLINE_FIELD, end_ms, "end")


NO_GOALS = LatencyGoals()


def read_goals(headers: Headers, *, is_enforced: bool) -> LatencyGoals:
    """Read the goals from a call's headers. Raises: InvalidRequest that names the header."""
    return LatencyGoals(
        ttft_ms=_goal(headers, TTFT_HEADER),
        tpot_ms=_goal(headers, TPOT_HEADER),
        is_enforced=is_enforced,
    )


def _goal(headers: Headers, name: str) -> float | None:
    """Read a goal from either header that it may have."""
    other = OTHER_NAMES[name]
    ms, other_ms = _milliseconds(headers, name), _milliseconds(headers, other)
    if ms is not None and other_ms is not None and ms != other_ms:
        message = f"{name}: is {ms:.12g}, but {other} is {other_ms:.12g}; send one of them"
        raise InvalidRequest(message, param=name)
    return other_ms if ms is None else ms


def _milliseconds(headers: Headers, name: str) -> float | None:
    values = headers.getlist(name)
    if not values:
        return None
    text = ", ".join(values)
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < number <= MS_MAX:
        message = f"{name}: must be a number of milliseconds above 0 and up to {MS_MAX}, not {text[:32]!r}"
        raise InvalidRequest(message, param=name)
    return number


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of a request by the pool's times, in milliseconds; None while unknown, or if they never exist."""

    ttft_ms: int | None
    tpot_ms: float | None


def latency_of(status: RequestStatus) -> Latency:
    """Compute the latencies. A mean needs two tokens, and an end that came with the last one and not from outside."""
    first, end = status.first_token_ms, status.end
    if first is None:
        return Latency(None, None)
    # The wall clock may have been set back.
    ttft_ms = max(0, first - status.request.submitted_ms)
    if end is None or status.ended_ms is None or end.reason not in _OWN_ENDS or end.count < 2:
        return Latency(ttft_ms, None)
    return Latency(ttft_ms, max(0, status.ended_ms - first) / (end.count - 1))


def judge(goals: LatencyGoals, status: RequestStatus, waited_ms: float = 0) -> dict[Goal, GoalOutcome]:
    """Judge those goals of a request that are decided.

    A request that was cut off is judged only if going on could not have changed the result: if a client cancels before
    its goals are missed, they stay undecided.

    Args: waited_ms: for a request without a reader, how long it had waited when its reader left.
    """
    found: dict[Goal, GoalOutcome] = {}
    latency = latency_of(status)
    if goals.ttft_ms is not None:
        if latency.ttft_ms is not None:
            found[Goal.TTFT] = _compare(latency.ttft_ms, goals.ttft_ms)
        elif _is_without_first_token(status, goals.ttft_ms, waited_ms):
            found[Goal.TTFT] = GoalOutcome.MISSED
    if goals.tpot_ms is not None:
        if latency.tpot_ms is not None:
            found[Goal.TPOT] = _compare(latency.tpot_ms, goals.tpot_ms)
        elif _is_too_slow_for_all_tokens(status, goals.tpot_ms):
            found[Goal.TPOT] = GoalOutcome.MISSED
    return found


def _compare(ms: float, goal_ms: float) -> GoalOutcome:
    return GoalOutcome.MET if ms <= goal_ms else GoalOutcome.MISSED


def _is_without_first_token(status: RequestStatus, goal_ms: float, waited_ms: float) -> bool:
    """Return whether it waited longer than the goal, or ended by a failure of the service before its first token."""
    if status.end is None or status.ended_ms is None:
        return waited_ms > goal_ms
    if status.end.reason in (FinishReason.CANCELLED, FinishReason.REFUSED, *_OWN_ENDS):
        return status.ended_ms - status.request.submitted_ms > goal_ms
    return True


def _is_too_slow_for_all_tokens(status: RequestStatus, goal_ms: float) -> bool:
    """Return whether it was cut off after a time in which all its allowed tokens should have come."""
    first_token_ms, ended_ms, end = status.first_token_ms, status.ended_ms, status.end
    if first_token_ms is None or ended_ms is None or end is None or end.reason in _OWN_ENDS:
        return False
    return ended_ms - first_token_ms >= (status.request.max_new_tokens - 1) * goal_ms


def summary(goals: LatencyGoals, statuses: Mapping[str, RequestStatus]) -> dict[str, int | float]:
    """Summarize a call for a log line or a span: each goal, the slowest time, and the number of misses."""
    fields: dict[str, int | float] = {}
    for goal, goal_ms in goals.named.items():
        times = [getattr(latency_of(status), f"{goal}_ms") for status in statuses.values()]
        known = [ms for ms in times if ms is not None]
        outcomes = [judge(goals, status).get(goal) for status in statuses.values()]
        fields |= {f"slo_{goal}_ms": goal_ms, f"slo_{goal}_missed": outcomes.count(GoalOutcome.MISSED)}
        fields |= {f"{goal}_ms": round(max(known), 3)} if known else {}
    return fields


def header_parameters() -> list[dict[str, Any]]:
    """Return the headers in the form of an OpenAPI document."""
    number = {"type": "number", "exclusiveMinimum": 0, "maximum": MS_MAX}
    form = "A decimal number such as `200` or `12.5`, without sign, unit or exponent."
    soft = "A soft goal: it is judged and counted, and ends nothing unless the server has `--slo-enforce`."
    order = "Under any order of claims but `arrival`, it also decides when a request starts, while it can be met."
    texts = {
        TTFT_HEADER: f"Milliseconds until the first token of each choice. {form} {soft} {order}",
        TPOT_HEADER: f"Mean milliseconds for each token after the first, written in the same way. {soft}",
    }
    other_name = "Another name of `{}`. If a call has both, their values must be equal."
    texts |= {other: other_name.format(name) for name, other in OTHER_NAMES.items()}
    return [
        {"name": name, "in": "header", "required": False, "schema": number, "description": text}
        for name, text in texts.items()
    ]
