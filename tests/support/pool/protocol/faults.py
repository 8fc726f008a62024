"""Faults of the model's simulations, and their rates."""

from dataclasses import dataclass
from random import Random

FAULTS = (
    "crash", "freeze", "double", "break_stage", "drain", "scale_away", "leave_client", "return_client", "cancel",
    "outage", "jump", "sync", "fail_over",
)  # fmt: skip


@dataclass(frozen=True)
class FaultSettings:
    """The faults of a simulation, and their rates."""

    faults: tuple[str, ...] = FAULTS
    fault_rate: float = 0.04  # per event
    repeat_rate: float = 0.4  # messages that arrive again, some of them much later
    is_exact: bool = False  # does the engine draw the same token again for the same history?
    # A replica that lags and may take over: gateways there show and accept what it holds.
    has_replica: bool = False
    # A group of another revision, which takes turns with the first one at being the current one.
    has_next_revision: bool = False
    # Tokens of a long prompt: too many for the small groups, or just as many as one of them can hold.
    large_prompt: int = 70
    # Share of the requests that break any stage which runs them.
    poison_rate: float = 0.0
    # Share of the calls that are made under one Idempotency-Key.
    keyed_rate: float = 0.0
    # Share of the claims that go by an order other than arrival, each group by its own. Where there are any, requests
    # differ in what an order looks at (orders.py).
    order_rate: float = 0.0
    # Share of the requests that a newer release stores: no process of a walk can read them.
    newer_rate: float = 0.0


def draw_fault_settings(random: Random) -> FaultSettings:
    """Draw the faults of a simulation."""
    return FaultSettings(
        faults=tuple(random.sample(FAULTS, random.randint(2, len(FAULTS)))),
        fault_rate=random.choice((0.01, 0.04, 0.1)),
        repeat_rate=random.choice((0.0, 0.1, 0.4)),
        is_exact=random.random() < 0.5,
        has_replica=random.random() < 0.25,
    )
