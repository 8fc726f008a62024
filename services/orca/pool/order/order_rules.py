"""The order of claims: its rules, and what a scheduler knows about run times when it claims.

The rules are the settings of a deployment. The estimates change with every step. Both come with each claim, so the pool
keeps no setting and learns nothing about devices.

Source: TCB (ICPP '22), section 5.2, Algorithm 1. docs/concepts/order-of-claims.md decides what the paper leaves open.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, inf

import orjson

from orca.core.domain.errors import SettingError
from orca.pool.order.order_class import DeadlineKind, OrderClass, longest_of, lower_bound, middle_of

PASSED_MAX = 1000
"""Most requests that one claim passes over: those that do not fit, are reserved for others, or cannot be read."""

DROPS_MAX = 100
"""Most requests of which one claim asks whether they are too late."""

INDEXED_AT_ONCE = 256
"""Waiting requests that one claim puts into an index that is not whole: some ten milliseconds of Redis."""

PATIENCE_MAX_S = 2**31 - 1
"""Longest patience, as in the resource. It is far below the times that Lua and Python write in different ways."""

ROUNDING = 1e-9
"""Difference below which a number counts as equal to its bound, in Python and in Lua."""

LATE = "it could not have been answered in time, so it ended before its deadline"
"""Detail of the end of a request that waited and was too late."""


class Order(StrEnum):
    """The rule by which waiting requests are claimed. Arrival needs no rules of this module."""

    ARRIVAL = "arrival"
    DEADLINE = "deadline"  # DAS, Algorithm 1 of the TCB paper
    EDF = "edf"  # earliest deadline first; for comparison
    SJF = "sjf"  # shortest job first: utility per cost alone; for comparison


class Utility(StrEnum):
    """The worth of a request that meets its deadline, before its weight."""

    EQUAL = "equal"  # 1, so the sum is goodput
    INVERSE_LENGTH = "inverse_length"  # 1 / length, as in the paper


class Drop(StrEnum):
    """Waiting requests that end before their deadline, because they are too late."""

    CERTAIN = "certain"  # alone in the engine, at the fastest step seen and with the fewest tokens
    EXPECTED = "expected"  # by expected values
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRules:
    """The rules of an order other than arrival."""

    order: Order = Order.DEADLINE
    utility: Utility = Utility.EQUAL
    # Share of a row that goes by utility alone, in (0, 1); q of the paper is 1 - eta. The paper leaves it open. By the
    # default, order deadline has as much goodput under overload as any order (docs/benchmarks/deadlines.md).
    eta: float = 0.75
    patience_ms: int = 30_000  # after which a request without a deadline goes first, the oldest before others
    drop: Drop = Drop.CERTAIN

    def __post_init__(self) -> None:
        """Raises: SettingError."""
        if self.order is Order.ARRIVAL:
            raise SettingError("order arrival has no rules: claim without them")
        if not 0 < self.eta < 1:
            raise SettingError(f"eta must be above 0 and below 1, not {self.eta:g}")
        if not 1 <= self.patience_ms / 1000 <= PATIENCE_MAX_S:
            raise SettingError(f"patience must be 1 to {PATIENCE_MAX_S} seconds, not {self.patience_ms / 1000:g}")

    def useful(self, prefix: int) -> int:
        """Return p: the requests of a prefix of so many that go by utility. Any share of any prefix has one."""
        share = self.utility_share
        return max(1, ceil(share * prefix - ROUNDING)) if share and prefix else 0

    @property
    def utility_share(self) -> float:
        """Return the share of the prefix that goes by utility: all of it under `sjf`, nothing under `edf`."""
        return {Order.DEADLINE: self.eta, Order.EDF: 0.0, Order.SJF: 1.0}[self.order]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimates:
    """Expectations of a group about the requests that it could claim. Times are in milliseconds; 0 is not known yet."""

    prompt_token_ms: float = 0.0  # of a step, for each prompt token in it
    step_ms: float = 0.0  # between two tokens of a request
    least_step_ms: float = 0.0  # the fastest step seen
    # Cost of a prompt token, in output tokens: many prompt tokens share a step, an output token takes a place in one.
    prompt_cost: float = 1.0
    # Mean output tokens that the pool has counted, by length class of the prompt.
    outputs: tuple[tuple[int, float], ...] = ()

    def expected_tokens(self, of: OrderClass) -> float:
        """Return the output tokens that requests of a class have on average.

        They are at most its `max_new_tokens`, and at least its fewest tokens: an output that nothing can end sooner has
        a known length. It is the place of a learnt predictor.
        """
        return max(middle_of(of.fewest), min(dict(self.outputs).get(of.prompt, inf), middle_of(of.output)))

    def own_ms(self, of: OrderClass) -> float:
        """Return the run time from the claim to what the deadline or the goal asks for; 0 without either.

        It is that of the longest requests of the class, as far as lengths are known. By a mean, half of the requests
        that are claimed at the end of their start windows would be late.
        """
        return self._run_ms(of, longest_of(of.prompt), max(longest_of(of.fewest), self.expected_tokens(of)))

    def expected_ms(self, of: OrderClass) -> float:
        """Return the same for the mean of the class."""
        return self._run_ms(of, middle_of(of.prompt), self.expected_tokens(of))

    def _run_ms(self, of: OrderClass, prompt_tokens: float, tokens: float) -> float:
        if of.kind is DeadlineKind.NONE and not of.goal:
            return 0.0
        steps = tokens if of.kind is DeadlineKind.END else 1.0
        return self.prompt_token_ms * prompt_tokens + self.step_ms * steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOrder:
    """The order of one claim: rules, estimates, and the prompt tokens that the row has left (TCB: L)."""

    rules: OrderRules
    estimates: RunEstimates = field(default_factory=RunEstimates)
    free_prompt_tokens: int
    total_prompt_tokens: int  # of an empty row: a longer prompt takes all of it

    def window_ms(self, of: OrderClass) -> float:
        """Return the start window of a class without a deadline, from submission: that of its goal or its patience.

        The sooner one counts. The window of a goal may be below 0: the own time alone is longer than the goal.
        """
        patience_ms = float(self.rules.patience_ms)
        return min(patience_ms, lower_bound(of.goal) - self.estimates.own_ms(of)) if of.goal else patience_ms

    def length(self, of: OrderClass) -> float:
        """Return the tokens that a request of a class is expected to compute: l of the paper."""
        return middle_of(of.prompt) + self.estimates.expected_tokens(of)

    def cost(self, of: OrderClass) -> float:
        """Return what a request of a class is expected to cost, in output tokens."""
        return self.estimates.prompt_cost * middle_of(of.prompt) + self.estimates.expected_tokens(of)

    def utility(self, of: OrderClass) -> float:
        """Return v of the paper, times the weight."""
        worth = 1.0 if self.rules.utility is Utility.EQUAL else 1.0 / self.length(of)
        return float(2.0**-of.priority) * worth

    def density(self, of: OrderClass) -> float:
        """Return the utility per cost, by which a row is filled: a heavy request cannot keep out many light ones."""
        return self.utility(of) / self.cost(of)


def lua() -> str:
    """Return the constants for the head of each script."""
    bounds = f"local PASSED_MAX, DROPS_MAX, ROUNDING = {PASSED_MAX}, {DROPS_MAX}, {ROUNDING!r}\n"
    index = f"local INDEXED_AT_ONCE = {INDEXED_AT_ONCE}\n"
    return f"{bounds}{index}local LATE = [==[{orjson.dumps(LATE).decode()}]==]\n"
