"""Random histories of waiting requests: everything that comes, goes, is claimed, is lost and is too late.

Each step draws one event and applies it to the twin and to Redis. `Pair.call` compares the answers.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from orca.core.domain.request import FinishReason, Request, SamplingParams
from orca.pool.order.order_rules import ClaimOrder, Drop, Order, OrderRules, RunEstimates, Utility
from orca.pool.records import (
    Caller,
    ClaimAnswer,
    Claimed,
    CommitAnswer,
    OnDisconnect,
    SeatEntered,
    Submission,
)
from support.pool.beds import REVISION, entry
from support.pool.pair import Pair

BLOCK = 16
GROUPS = ("g", "h")
CROWD = 100
"""Choices of a parent of a crowd."""

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(ignore_eos=True),
    SamplingParams(min_tokens=6),
    SamplingParams(ignore_eos=True, stop=("a",)),
)
ORDERS = (Order.DEADLINE, Order.DEADLINE, Order.DEADLINE, Order.EDF, Order.SJF)
UNKNOWN_SCHEMA = 9


@dataclass(slots=True)
class Seated:
    """The process that a history last sent into a group."""

    caller: Caller
    calls: int = 0
    claim: tuple[int, ClaimOrder | None] | None = None  # number and order of its last claim

    def next_call(self) -> int:
        self.calls += 1
        return self.calls


@dataclass(slots=True)
class Running:
    claimed: Claimed
    length: int  # of the log


class History:
    """A history of two pools. Args: crowds: of requests that are alike, more of them than one claim passes over."""

    def __init__(self, seed: int, pair: Pair, *, crowds: int = 0) -> None:
        self.numbers = Random(seed)
        self.pair = pair
        self.crowds = crowds
        self.seats: dict[str, Seated] = {}
        self.running: dict[str, Running] = {}
        self.requests: list[str] = []
        self.names = 0
        self.has_targets = self.numbers.random() < 0.2
        # Only the index in Redis loses places, and is built again. It equals that of the twin if one claim builds it,
        # and if nothing is unreadable.
        self.loses_places = self.numbers.random() < 0.5 and not crowds

    async def run(self, steps: int) -> None:
        """Draw steps, then end all that is left. Raises: Difference."""
        await self.pair.call("set_revision", REVISION, 1)
        await self.enter()
        events: dict[Callable[[], Awaitable[None]], float] = {
            self.submit: 30,
            self.claim: 30,
            self.commit: 20,
            self.pass_time: 25,
            self.sweep: 5,
            self.enter: 2,
            self.give_back: 3,
            self.cancel: 3,
            self.repeat_claim: 2,
            self.drop_index: 1,
            self.lose_place if self.loses_places else self.hide: 1,
        }
        crowds = sorted(self.numbers.sample(range(steps // 2), self.crowds))
        for step in range(steps):
            if step in crowds:
                await self.submit_crowd()
            (event,) = self.numbers.choices(list(events), list(events.values()))
            await event()
        await self.end()

    async def submit(self) -> None:
        numbers = self.numbers
        self.names += 1
        parent = f"p{self.names}"
        choices = numbers.choice((1, 1, 1, 2, 4))
        requests = tuple(drawn_request(numbers, parent, choice, self.has_targets) for choice in range(choices))
        await self._submit(requests)

    async def submit_crowd(self) -> None:
        """Submit requests of one class and of one length, of which a claim often has room for the shortest alone."""
        numbers = self.numbers
        deadline_ms, patience = numbers.choice(((None, 0), (90_000, 0), (90_000, 40_000)))
        for _ in range(numbers.choice((2, 11))):
            self.names += 1
            await self._submit(
                tuple(
                    Request(
                        parent=f"p{self.names}",
                        choice=choice,
                        revision=REVISION,
                        prompt=(1, 2, 3),
                        max_new_tokens=127,
                        sampling=SAMPLINGS[1],
                        deadline_ms=deadline_ms and deadline_ms - numbers.randrange(patience + 1),
                    )
                    for choice in range(CROWD)
                )
            )

    async def _submit(self, requests: tuple[Request, ...]) -> None:
        submission = Submission(
            parent=requests[0].parent, requests=requests, reader="reader", on_disconnect=OnDisconnect.KEEP
        )
        if isinstance(await self.pair.call("submit", submission), tuple):
            self.requests += [request.id for request in requests]

    async def enter(self) -> None:
        """Send a new process into a group, as after the death of its owner, or after it has left."""
        for group in GROUPS if not self.seats else (self.numbers.choice(GROUPS),):
            if group in self.seats and self.numbers.random() < 0.3:
                await self.pair.call("leave", self.seats[group].caller)
            self.names += 1
            seat = Seated(Caller(group=group, process=f"process{self.names}", revision=REVISION))
            blamed = {name: one.claimed.claim for name, one in self.running.items() if self.numbers.random() < 0.3}
            is_dead = self.numbers.random() < 0.8 or group not in self.seats
            answer = await self.pair.call(
                "enter", seat.caller, seat.next_call(), reported_epoch=0, is_holder_dead=is_dead, blamed=blamed
            )
            if isinstance(answer, SeatEntered):
                self.seats[group] = seat

    async def claim(self) -> None:
        numbers, group = self.numbers, self.numbers.choice(GROUPS)
        seat = self.seats[group]
        if numbers.random() < 0.8:
            await self.pair.call("heartbeat", seat.caller)
        order = drawn_order(numbers) if numbers.random() < 0.9 else None
        blocks = (0, numbers.randrange(8), numbers.randrange(40), 7, 8, 10_000)
        await self._claim(seat, order, BLOCK * numbers.choice(blocks), BLOCK * numbers.choice((4, 12, 30, 10_000)))

    async def _claim(
        self, seat: Seated, order: ClaimOrder | None, free: int, total: int, most: int | None = None
    ) -> int:
        """Claim, and return the number of requests that came."""
        numbers = self.numbers
        call, most = seat.next_call(), numbers.choice((0, 1, 2, 3, 5, 8, 100)) if most is None else most
        answer = await self.pair.call(
            "claim",
            seat.caller,
            call,
            free_slots=free,
            total_slots=max(free, total),
            block_tokens=BLOCK,
            most=most,
            order=order,
        )
        if not isinstance(answer, ClaimAnswer):
            return 0
        seat.claim = call, order
        for claimed in answer.claimed:
            self.running[claimed.request.id] = Running(claimed, len(claimed.log))
        return len(answer.claimed)

    async def repeat_claim(self) -> None:
        seat = self.seats[self.numbers.choice(GROUPS)]
        if seat.claim is not None:
            call, order = seat.claim
            room = {"free_slots": 0, "total_slots": 0, "block_tokens": BLOCK, "most": 0}
            await self.pair.call("claim", seat.caller, call, order=order, **room)

    async def commit(self) -> None:
        numbers = self.numbers
        for name in numbers.sample(sorted(self.running), min(len(self.running), numbers.randrange(1, 6))):
            one = self.running[name]
            # Rarely a token is there already, or one before it is missing.
            index = max(0, one.length + numbers.choice((0,) * 18 + (-1, 1)))
            reasons = (FinishReason.STOP, FinishReason.LENGTH)
            end = numbers.choice(reasons) if numbers.random() < 0.3 else None
            await self._commit(one, index, numbers.randrange(1, 4), end)

    async def _commit(self, one: Running, index: int, tokens: int, end: FinishReason | None) -> None:
        tokens = min(tokens, one.claimed.request.max_new_tokens - index)
        if tokens <= 0 and end is None:
            return
        made = entry(one.claimed, index, *range(100 + index, 100 + index + tokens), end=end)
        (answer,) = await self.pair.call("commit", [made])
        if answer is CommitAnswer.APPLIED and end is None:
            one.length = index + len(made.tokens)
        elif answer is not CommitAnswer.ALREADY_THERE or end is not None:
            del self.running[one.claimed.request.id]

    async def give_back(self) -> None:
        names = self.numbers.sample(sorted(self.running), min(len(self.running), 3))
        if names:
            await self.pair.call("give_back", {name: self.running.pop(name).claimed.claim for name in names})

    async def cancel(self) -> None:
        if self.requests:
            name = self.numbers.choice(self.requests).partition(".")[0]
            await self.pair.call(self.numbers.choice(("cancel", "cancel", "forget")), name)

    async def pass_time(self) -> None:
        numbers = self.numbers
        longest_ms = numbers.choice((20, 20, 20, 1_000, 1_000, 5_000, 40_000))
        clock = self.pair.clock
        clock.set(clock.wall_ms() + numbers.randrange(longest_ms))

    async def sweep(self) -> None:
        await self.pair.call("sweep")

    async def drop_index(self) -> None:
        """Put the schema before orders in force for a while, or the next one again."""
        await self.pair.call("set_schema", 2 if self.numbers.random() < 0.4 else 3)

    async def lose_place(self) -> None:
        """Let the index in Redis miss a waiting request, as if a part had queued it that knows no index."""
        redis, keys = self.pair.bed.redis, self.pair.bed.keys
        classes = keys.named("classes", REVISION)
        found = sorted(of.decode() for of in await redis.hkeys(classes) if of)
        index = self.pair.twin.state.waiting.indexes.get(REVISION)
        if not found or index is None or not index.is_whole:
            return
        of = self.numbers.choice(found)
        await redis.zpopmin(keys.named("waiting", f"{REVISION}/{of}"))
        if await redis.hincrby(classes, of, -1) == 0:
            await redis.hdel(classes, of)

    async def hide(self) -> None:
        """Let a parent of one request have been written by a release that is not known yet."""
        alone = [name for name in self.requests if name.endswith(".0") and f"{name[:-1]}1" not in self.requests]
        known = [name for name in alone if name in self.pair.twin.state.records]
        if known:
            name, bed = self.numbers.choice(known), self.pair.bed
            record = self.pair.twin.state.records[name]
            for number, change in ((record.schema, -1), (UNKNOWN_SCHEMA, 1)):
                await bed.redis.hincrby(bed.keys.single("meta"), f"written:{number}", change)
            record.schema = UNKNOWN_SCHEMA
            await bed.set_record_schema(name.partition(".")[0], UNKNOWN_SCHEMA)

    async def end(self) -> None:
        """Compare all that is there, then claim and end it."""
        await self.pair.call("set_schema", 3)
        self.seats.clear()
        await self.enter()
        seats = list(self.seats.values())
        await self._claim(seats[0], drawn_order(self.numbers), 0, 0)  # it builds an index that has lost a place
        await self.pair.compare(self.requests)
        taken = 1
        while taken:
            taken = 0
            for seat in seats:
                taken += await self._claim(seat, drawn_order(self.numbers), 10**6, 10**6, most=400)
                for name in sorted(self.running):
                    await self._commit(self.running[name], self.running[name].length, 1, FinishReason.STOP)
        await self.pair.call("sweep")
        await self.pair.compare(self.requests)


def drawn_request(numbers: Random, parent: str, choice: int, has_target: bool) -> Request:
    """Draw a request. Many are alike, and many deadlines are equal or soon."""
    soon_ms = (numbers.randrange(500, 5_000), numbers.randrange(5_000, 60_000), 20_000, 600_000)
    return Request(
        parent=parent,
        choice=choice,
        revision=REVISION,
        prompt=(1,) * numbers.choice((1, 3, 16, 40, 90, 600)),
        max_new_tokens=numbers.choice((1, 2, 5, 16, 17, 64, 300)),
        sampling=numbers.choice(SAMPLINGS),
        deadline_ms=numbers.choice((None, None, *soon_ms)),
        first_token_deadline_ms=numbers.choice((None, None, None, *soon_ms[:2])),
        weight=numbers.choice((None, None, None, 2.0, 0.5, 4.0, 256.0, 2.0**-8)),
        first_token_goal_ms=numbers.choice((None, None, 3, *soon_ms)),
        decoder_prefix=(1, 2) if has_target else (),
    )


def drawn_order(numbers: Random) -> ClaimOrder:
    """Draw the order of a claim."""
    total = numbers.choice((30, 64, 512, 10**6))
    step_ms = numbers.choice((0.0, 1.7, 11.3, 150.0))
    return ClaimOrder(
        rules=OrderRules(
            order=numbers.choice(ORDERS),
            utility=numbers.choice(tuple(Utility)),
            eta=numbers.choice((0.1, 0.28, 0.5, OrderRules().eta, 0.9)),
            patience_ms=numbers.choice((1_000, 30_000)),
            drop=numbers.choice(tuple(Drop)),
        ),
        estimates=RunEstimates(
            prompt_token_ms=numbers.choice((0.0, 0.37)),
            step_ms=step_ms,
            least_step_ms=numbers.choice((0.0, step_ms / 2, step_ms)),
            prompt_cost=numbers.choice((1.0, 0.05)),
            outputs=numbers.choice(((), ((4, 3.25), (8, 20.5)))),
        ),
        free_prompt_tokens=numbers.randint(0, total),
        total_prompt_tokens=total,
    )
