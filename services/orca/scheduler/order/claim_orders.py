"""The order of each claim: the rules of the deployment, with what this group has measured and the pool has counted."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable

from orca.pool.length_bins import HALF_LIFE_S, bounds_of
from orca.pool.order.order_class import length_class
from orca.pool.order.order_rules import ClaimOrder, OrderRules, RunEstimates
from orca.pool.records import ClaimAnswer, LengthCounts
from orca.scheduler.order.run_times import RunTimes
from orca.scheduler.policy.policy import PromptRoom

log = logging.getLogger("orca.scheduler")

REFRESH_S = 60.0
"""Seconds between two looks at the lengths that the pool has counted."""

ANSWERS_MIN = 20
"""Weighed answers of a class of prompts below which their mean length says nothing."""


class ClaimOrders:
    """Makes the order of each claim. `times` observes the loop's steps."""

    def __init__(self, rules: OrderRules) -> None:
        self.rules = rules
        self.times = RunTimes()
        self._outputs: tuple[tuple[int, float], ...] = ()
        self.is_in_force = True  # as the last claim was answered

    @property
    def estimates(self) -> RunEstimates:
        return RunEstimates(
            prompt_token_ms=self.times.prompt_token_ms,
            step_ms=self.times.token_ms,
            least_step_ms=self.times.least_token_ms,
            prompt_cost=self.times.prompt_cost,
            outputs=self._outputs,
        )

    def of_claim(self, room: PromptRoom) -> ClaimOrder:
        """Return the order of a claim. Args: room: prompt tokens that the next step can still take."""
        return ClaimOrder(
            rules=self.rules,
            estimates=self.estimates,
            free_prompt_tokens=room.free,
            total_prompt_tokens=room.total,
        )

    def note(self, answer: ClaimAnswer) -> None:
        """Say in the log whether the pool claims by this order: while an older schema is in force it does not."""
        if answer.is_by_order == self.is_in_force:
            return
        self.is_in_force = answer.is_by_order
        if answer.is_by_order:
            log.info("claims go by order %s now", self.rules.order.value)
        else:
            log.warning(
                "claims go by arrival and not by order %s: the pool has an older schema number in force",
                self.rules.order.value,
            )

    async def follow_lengths(self, read: Callable[[], Awaitable[LengthCounts]]) -> None:
        """Use the lengths of answers that the pool has counted, until cancelled. Args: read: reads them."""
        while True:
            self._outputs = mean_outputs(await read())
            await asyncio.sleep(REFRESH_S)


def mean_outputs(counts: LengthCounts) -> tuple[tuple[int, float], ...]:
    """Return the mean output tokens by length class of the prompt, where enough answers were counted."""
    answers: dict[int, float] = defaultdict(float)
    tokens: dict[int, float] = defaultdict(float)
    for (prompt, output), weight in counts.weighed(HALF_LIFE_S).items():
        number = length_class(max(1, sum(bounds_of(prompt)) // 2))
        answers[number] += weight
        tokens[number] += weight * sum(bounds_of(output)) / 2
    return tuple((number, tokens[number] / count) for number, count in sorted(answers.items()) if count >= ANSWERS_MIN)
