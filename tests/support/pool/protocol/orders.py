"""Orders of claims in the model's simulations: the rules of each group, and requests that differ for them."""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from orca.pool.order.order_rules import ClaimOrder, Drop, Order, OrderRules, RunEstimates, Utility
from orca.pool.schemas import SCHEMA_OF_ORDERS

if TYPE_CHECKING:
    from support.pool.protocol.model import Simulation


@dataclass
class GroupOrders:
    """The rules by which each group of a walk claims, and what it expects of run times at each claim."""

    simulation: "Simulation"

    def __post_init__(self) -> None:
        self.rules: dict[str, OrderRules] = {}  # by group

    def draw(self, group: str) -> ClaimOrder | None:
        """Draw the order of a claim. Returns: None for arrival, without a draw where all claims go by arrival."""
        rate, random = self.simulation.faults.order_rate, self.simulation.random
        if not rate or random.random() >= rate:
            return None
        if group not in self.rules:
            self.rules[group] = _draw_rules(random)
        total = random.choice((8, 64, 512))
        return ClaimOrder(
            rules=self.rules[group],
            estimates=_draw_estimates(random),
            free_prompt_tokens=random.choice((total, total, total // 2)),
            total_prompt_tokens=total,
        )


def _draw_rules(random: Random) -> OrderRules:
    return OrderRules(
        order=random.choice((Order.DEADLINE, Order.EDF, Order.SJF)),
        utility=random.choice(tuple(Utility)),
        eta=random.choice((0.25, 0.5, 0.75)),
        patience_ms=random.choice((1_000, 2_000, 5_000)),
        drop=random.choice(tuple(Drop)),
    )


def _draw_estimates(random: Random) -> RunEstimates:
    """Nothing is known at first, and then it changes from claim to claim."""
    step_ms = random.choice((0, 20, 200, 1_000))
    return RunEstimates(
        prompt_token_ms=random.choice((0, 1, 10)) if step_ms else 0,
        step_ms=step_ms,
        least_step_ms=step_ms * random.choice((0.25, 1.0)),
        outputs=random.choice(((), ((2, 3.0), (3, 5.0)))),
    )


def draw_fields(random: Random, token: int, large_prompt: int, schema: int) -> dict[str, Any]:
    """Draw deadlines, goal, weight and prompt of a request; most have no deadline, and one of six has a large prompt.

    Args:
        token: of the prompt.
        schema: the number in force, which may have no weights and no goals.
    """
    weight = random.choice((None, None, 0.25, 4.0))
    # Without a draw of its own, which would make other walks of all seeds.
    goal_ms = (None, 300, 1_200, 10_000)[token % 4]
    return {
        "prompt": (token,) * random.choice((1, 3, 3, 6, 6, large_prompt)),
        "deadline_ms": random.choice((500, 3_000, 60_000)) if random.random() < 0.2 else None,
        "first_token_deadline_ms": random.choice((500, 3_000, 10_000)) if random.random() < 0.2 else None,
        "weight": weight if schema >= SCHEMA_OF_ORDERS else None,
        "first_token_goal_ms": goal_ms if schema >= SCHEMA_OF_ORDERS else None,
    }
