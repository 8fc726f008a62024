"""Random queues of waiting requests, and what DAS makes of them (scheduler/policy/das.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from orca.core.domain.request import Request, SamplingParams
from orca.pool.order.order_class import DeadlineKind, OrderClass, class_of, lower_bound
from orca.pool.order.order_rules import ClaimOrder, Drop, OrderRules, RunEstimates, Utility
from orca.scheduler.policy.das import WaitingRequest, das

BLOCK, PATIENCE_MS = 16, 600_000

SAMPLINGS = (SamplingParams(), SamplingParams(ignore_eos=True), SamplingParams(min_tokens=6))


@dataclass(frozen=True, slots=True)
class RandomQueue:
    """Requests in order of arrival, and a claim."""

    requests: tuple[Request, ...]
    order: ClaimOrder
    most: int
    slots: int


def random_queue(seed: int, revision: str, *, largest: int = 12) -> RandomQueue:
    """Draw a queue in which every request is in time, and a row that takes some of it."""
    numbers = Random(seed)
    step_ms = numbers.choice((0.0, 11.3))
    # Those that cannot be met are shorter than a step: time passes until the claim.
    goals = (None, None, 300_000, 400_000, 900_000) + ((1, 7) if step_ms else ())
    requests = tuple(
        Request(
            parent=f"q{seed}x{number}",
            choice=0,
            revision=revision,
            prompt=(1,) * numbers.choice((1, 3, 16, 40, 90)),
            max_new_tokens=numbers.choice((1, 2, 5, 16, 17, 64)),
            sampling=numbers.choice(SAMPLINGS),
            # Some deadlines are equal, and so are some classes.
            deadline_ms=numbers.choice(
                (None, 600_000, 600_000 + numbers.randrange(5), numbers.randrange(10**6, 10**7))
            ),
            first_token_deadline_ms=numbers.choice((None, None, numbers.randrange(10**6, 10**7))),
            weight=numbers.choice((None, None, 2.0, 0.5, 4.0)),
            first_token_goal_ms=numbers.choice(goals),
        )
        for number in range(numbers.randint(0, largest))
    )
    total = numbers.choice((30, 64, 512))
    order = ClaimOrder(
        rules=OrderRules(
            utility=numbers.choice(tuple(Utility)),
            eta=numbers.choice((0.1, 0.28, 0.5, OrderRules().eta, 0.9)),
            patience_ms=PATIENCE_MS,
            drop=Drop.NEVER,
        ),
        estimates=RunEstimates(
            prompt_token_ms=numbers.choice((0.0, 0.37)),
            step_ms=step_ms,
            prompt_cost=numbers.choice((1.0, 0.05)),
            outputs=numbers.choice(((), ((4, 3.25), (8, 20.5)))),
        ),
        free_prompt_tokens=numbers.randint(1, total),
        total_prompt_tokens=total,
    )
    return RandomQueue(requests, order, most=numbers.randint(0, 6), slots=numbers.randint(0, 20) * BLOCK)


def by_das(queue: RandomQueue, stored: Sequence[Request]) -> list[str]:
    """Return the ids in the order of DAS. Args: stored: the requests with their arrivals and times."""
    order = queue.order
    waiting, names = [], {}
    for request in stored:
        deadline = request.first_deadline_wall_ms
        kind = DeadlineKind.END if deadline == request.deadline_wall_ms else DeadlineKind.FIRST_TOKEN
        own = class_of(request, DeadlineKind.NONE if deadline is None else kind)
        names[request.arrival] = request.id
        waiting.append(
            WaitingRequest(
                arrival=request.arrival,
                sizes=(
                    1,
                    request.slots(BLOCK),
                    min(len(request.prompt), order.total_prompt_tokens)
                    if len(stored) > queue.most
                    else len(request.prompt),
                ),
                utility=order.utility(own),
                length=order.cost(own),
                deadline=request.submitted_ms + _window_ms(own, order) if deadline is None else deadline,
                own_time=0 if deadline is None else order.estimates.own_ms(own),
            )
        )
    # If all that waits has a place, prompts need not fill one step after the other.
    row = queue.most, queue.slots, order.free_prompt_tokens if len(stored) > queue.most else 10**9
    (filled,) = das(waiting, [row], eta=order.rules.eta, q=1 - order.rules.eta)
    return [names[request.arrival] for request in filled.chosen]


def _window_ms(of: OrderClass, order: ClaimOrder) -> float:
    """Return the start window of a request without a deadline: that of its goal if it can be met, or its patience."""
    goal_ms = lower_bound(of.goal) - order.estimates.own_ms(of) if of.goal else PATIENCE_MS
    return goal_ms if 0 <= goal_ms < PATIENCE_MS else PATIENCE_MS
