"""Builders for scheduler tests: requests, an unreliable pool, and a simulation of the real loop on virtual time."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import count
from types import MappingProxyType
from typing import Any

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.request import End, FinishReason, Request, SamplingParams, Token
from orca.core.domain.step import Claim, Epoch, Part, Row, Step
from orca.pool.memory.pool import MemoryPool
from orca.pool.order.order_rules import OrderRules
from orca.pool.records import Caller, OnDisconnect, OwnershipState, Submission
from orca.scheduler.dependencies import Dependencies, LoopTimings
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_blocks import SimulatedBlocks
from orca.scheduler.engines.simulated_engine import (
    RefusalSource,
    SimulatedEngine,
    StepFault,
    TokenSource,
    no_faults,
    no_refusals,
    seeded_tokens,
)
from orca.scheduler.engines.step_cost import StepCost
from orca.scheduler.engines.virtual_time import VirtualClock
from orca.scheduler.loop import GroupScheduler, SchedulingOptions
from orca.scheduler.observer import IterationHistory, IterationRecord, Observers
from orca.scheduler.order.claim_orders import ClaimOrders
from orca.scheduler.policy.admission import charged_slots
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import BatchLimits, Policy, next_batch
from orca.scheduler.policy.state import GroupState

REVISION = "r1"


def a_request(
    name: str = "A",
    *,
    prompt: int = 3,
    new: int = 4,
    arrival: int = 0,
    revision: str = REVISION,
    deadline_ms: int | None = None,
    prefix: int = 0,
    **sampling: Any,
) -> Request:
    """A request with `prompt` tokens that generates at most `new`; with a `prefix` of an encoder-decoder model."""
    return Request(
        parent=name,
        choice=0,
        revision=revision,
        prompt=tuple(range(100, 100 + prompt)),
        max_new_tokens=new,
        sampling=SamplingParams(**sampling),
        arrival=arrival,
        deadline_ms=deadline_ms,
        decoder_prefix=tuple(range(500, 500 + prefix)),
    )


def by_index(token: Callable[[int], int]) -> TokenSource:
    """A model whose tokens depend on their index alone."""
    return lambda request_id, index: token(index)  # noqa: ARG005 - a token source's shape


def some_limits(**changes: Any) -> BatchLimits:
    """Wide limits of one stage, to be narrowed by the test."""
    wide = {"stages": 1, "max_batch_size": 4, "slots": 4096, "block_tokens": 1, "max_model_len": 1024}
    return BatchLimits(**(wide | changes))


def schedule_all(
    policy: Policy,
    limits: BatchLimits,
    requests: Iterable[Request],
    *,
    late: Sequence[tuple[int, Request]] = (),
    logs: Mapping[str, int] = MappingProxyType({}),
    ends: Callable[[Request, int], bool] = lambda request, index: False,  # noqa: ARG005 - shape of the argument
) -> list[Step]:
    """Play the engine by hand: submit whenever the policy has a batch, else return the oldest step; check each turn.

    With a prefix cache the blocks of the stages are checked too. The token drawn is 7.

    `late` requests come in at a turn, with the arrival number that they have, which may be an old one. `logs` has the
    number of tokens that earlier claims of a request have logged, by its id.
    """
    state, steps, epoch = GroupState(prefixes=limits.make_prefixes()), [], Epoch(1, "test")
    blocks = None
    if limits.shares_prefixes:
        blocks = SimulatedBlocks(limits.slots // limits.block_tokens, limits.block_tokens)
    for number, request in enumerate(requests, 1):
        log = (Token(7),) * logs.get(request.id, 0)
        state.add(replace(request, arrival=request.arrival or number), Claim(1, "test/1"), log)
    to_come = sorted(late, key=lambda item: item[0])
    turn = 0
    while state.requests or state.steps or to_come:
        turn += 1
        while to_come and (to_come[0][0] <= turn or not (state.requests or state.steps)):
            state.add(to_come.pop(0)[1], Claim(1, "test/1"))
        batch = next_batch(policy, state, limits)
        state.check(limits.block_tokens)
        if batch.rows or (batch.freed and not state.steps):
            steps.append(state.schedule(batch, epoch))
            if blocks is not None:
                _run(blocks, steps[-1])
                assert state.prefixes is not None
                assert blocks.free == state.prefixes.index.free
            state.check(limits.block_tokens)
            assert charged_slots(state) <= limits.slots
            continue
        assert state.steps, "deadlock: nothing runs and nothing can be selected"
        for pick in state.read().rows:
            if pick.sample and not pick.request.is_ended:
                index = pick.request.received
                state.receive(pick.request, 7)
                if ends(pick.request.request, index) or index + 1 == pick.request.request.max_new_tokens:
                    state.end(pick.request)
    assert state.reserved == 0
    return steps


def _run(blocks: SimulatedBlocks, step: Step) -> None:
    blocks.take(step)
    for row in step.rows:
        if row.sample:
            blocks.draw(row.handle, 7)


def older_ran_most(steps: Sequence[Step]) -> bool:
    """Return whether after each step an older request has run as many iterations as a younger one, or more.

    Requests that will run no more are left out.
    """
    runs: Counter[int] = Counter()
    last = {row.handle: step.number for step in steps for row in step.rows}
    for step in steps:
        runs.update(row.handle for row in step.rows)
        alive = [runs[handle] for handle in sorted(last) if last[handle] >= step.number]
        if alive != sorted(alive, reverse=True):
            return False
    return True


def batches(steps: Sequence[Step]) -> list[str]:
    """The names in each step with rows, such as ["AB", "CD"]; requests are named by single letters.

    A source has the name of its request in lower case.
    """
    names = {new.handle: new.request_id.removesuffix(".0") for step in steps for new in step.new}

    def name(row: Row) -> str:
        return names[row.handle].lower() if row.part is Part.SOURCE else names[row.handle]

    return ["".join(map(name, step.rows)) for step in steps if step.rows]


def lengths(steps: Sequence[Step]) -> list[list[int]]:
    """The number of tokens of each row, step by step."""
    return [[row.count for row in step.rows] for step in steps if step.rows]


class UnreliablePool:
    """A pool behind a network: calls take time, and some get no answer, before or after they happened."""

    def __init__(self, inner: MemoryPool, chance: random.Random, *, loss: float = 0.0, delay_ms: float = 0.0) -> None:
        self._inner = inner
        self._chance = chance
        self._loss = loss
        self._delay_ms = delay_ms

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "wait_for_work":
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._travel()
            if self._chance.random() < self._loss:
                raise PoolUnavailable("the call was lost")
            answer = await method(*args, **kwargs)
            await self._travel()
            if self._chance.random() < self._loss:
                raise PoolUnavailable("the answer was lost")
            return answer

        return call

    async def _travel(self) -> None:
        if self._delay_ms:
            await asyncio.sleep(self._chance.random() * self._delay_ms / 1e3)


class Checks(IterationHistory):
    """Keeps the iteration log and recounts the group's state whenever a step was read."""

    def __init__(self, limits: Callable[[], tuple[int, int | None]], block_tokens: int) -> None:
        super().__init__()
        self._limits = limits
        self._block_tokens = block_tokens
        self.scheduler: GroupScheduler | None = None
        self.ends: list[str] = []
        self.reasons: list[str] = []  # why epochs broke
        self.alone: list[str] = []  # requests that had to run alone
        self.failed: list[str] = []  # requests that were blamed, those that it ended included

    def iterated(self, record: IterationRecord) -> None:
        super().iterated(record)
        assert self.scheduler is not None
        assert self.scheduler.state is not None
        self.scheduler.state.check(self._block_tokens)
        max_batch_size, max_batch_tokens = self._limits()
        assert len(record.batch.rows) <= max_batch_size
        entering = [entry.source_tokens + len(entry.known) for entry in record.batch.sources]
        if max_batch_tokens is not None and record.tokens > max_batch_tokens:
            assert len(entering) == 1, "a step of several prompts, or of none, is above the bound"
            assert record.tokens < max(max_batch_tokens, entering[0]) + max_batch_size, "too far above the bound"

    def broke(self, epoch: Epoch, reason: str) -> None:  # noqa: ARG002 - an observer's shape
        self.reasons.append(reason)

    def isolated(self, request: Request) -> None:
        self.alone.append(request.id)

    def blamed(self, failed: Sequence[str], poisoned: Sequence[str]) -> None:
        self.failed += [*failed, *poisoned]

    def ended(self, request: Request, reason: FinishReason, tokens: int) -> None:  # noqa: ARG002 - an observer's shape
        self.ends.append(request.id)


@dataclass
class Group:
    """One group of the simulation: its stages live on when its scheduler dies."""

    name: str
    engine: SimulatedEngine
    processes: int = 0
    task: asyncio.Task[None] | None = None
    scheduler: GroupScheduler | None = None
    logs: list[Checks] = field(default_factory=list)

    @property
    def records(self) -> list[IterationRecord]:
        return [record for log in self.logs for record in log.records]


@dataclass(kw_only=True)
class Simulation:
    """A pool, groups, and the requests that were submitted. Make it inside a running virtual loop."""

    tokens: TokenSource
    eos: tuple[int, ...] = ()
    choices: SchedulingOptions = field(default_factory=SchedulingOptions)
    policy: Policy = field(default_factory=IterationPolicy)
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    loss: float = 0.0
    delay_ms: float = 0.0
    timings: LoopTimings = field(default_factory=LoopTimings)
    make_stop_string_matcher: Any = None
    forces_last_token: bool = False
    refuse: Callable[[Request], str | None] = lambda request: None  # noqa: ARG005 - shape of the function
    rules: OrderRules | None = None  # of another order of claims than arrival

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.pool = MemoryPool(self.clock)
        self.groups: dict[str, Group] = {}
        self.submitted: dict[str, Request] = {}

    def add_group(
        self,
        shape: EngineShape,
        *,
        name: str = "g0",
        cost: StepCost | None = None,
        faults: Callable[[Step], StepFault | None] = no_faults,
        refusals: RefusalSource = no_refusals,
        refuses: Callable[[Epoch], str | None] = lambda epoch: None,  # noqa: ARG005 - shape of the argument
    ) -> Group:
        engine = SimulatedEngine(
            shape,
            cost=cost,
            tokens=self.tokens,
            faults=faults,
            refusals=refusals,
            refuses=refuses,
            step_timeout_us=300_000,
            prefixes=self.choices.prefixes,
        )
        self.groups[name] = Group(name, engine)
        return self.groups[name]

    def start(self, group: Group) -> GroupScheduler:
        """Start a scheduler process for the group, a new one each time."""
        group.processes += 1
        checks = Checks(
            lambda: (self.choices.max_batch_size, self.choices.max_batch_tokens), group.engine.shape.block_tokens
        )
        orders = None if self.rules is None else ClaimOrders(self.rules)
        dependencies = Dependencies(
            pool=UnreliablePool(self.pool, self.chance, loss=self.loss, delay_ms=self.delay_ms),  # type: ignore[arg-type]
            engine=group.engine,
            policy=self.policy,
            caller=Caller(group=group.name, process=f"{group.name}-p{group.processes}", revision=REVISION),
            calls=count(1),
            clock_ns=self.clock.monotonic_ns,
            wall_ms=self.clock.wall_ms,
            observer=checks if orders is None else Observers([checks, orders.times]),
            orders=orders,
            eos_token_ids=self.eos,
            make_stop_string_matcher=self.make_stop_string_matcher,
            forces_last_token=self.forces_last_token,
            timings=self.timings,
            refuse=self.refuse,
        )
        scheduler = GroupScheduler(dependencies, self.choices)
        checks.scheduler = group.scheduler = scheduler
        group.logs.append(checks)
        group.task = asyncio.create_task(scheduler.run())
        return scheduler

    async def crash(self, group: Group) -> None:
        """End the scheduler process of a group without a word to anybody."""
        assert group.task is not None
        # Nothing of a dead process reaches the pool any more, not even what its clean-up would send.
        self.lose_all_calls(group)
        group.task.cancel()
        await asyncio.wait((group.task,))

    async def queue_up(self, requests: Iterable[Request]) -> None:
        """Submit before any group runs, under a revision that is in force already."""
        await self.pool.promise_slots(REVISION, 64)
        await self.pool.set_revision(REVISION, 1)
        for request in requests:
            await self.submit(request)

    def delay_calls(self, group: Group, delay_ms: float) -> None:
        """Delay calls of the group's scheduler from now on, by at most this much each way."""
        assert group.scheduler is not None
        group.scheduler._dependencies.pool.__dict__["_delay_ms"] = delay_ms

    def lose_all_calls(self, group: Group) -> None:
        """Lose all calls that the group's scheduler sends to the pool from now on."""
        assert group.scheduler is not None
        group.scheduler._dependencies.pool.__dict__["_loss"] = 1.0  # type: ignore[attr-defined]

    async def submit(self, request: Request) -> Request:
        if await self._is_closed():
            await self.until(self._revision_is_current)
        (stored,) = await self.pool.submit(
            Submission(parent=request.parent, requests=(request,), reader="reader", on_disconnect=OnDisconnect.KEEP)
        )
        self.submitted[stored.id] = stored
        return stored

    async def _is_closed(self) -> bool:
        return (await self.pool.stats()).revision is None

    async def _revision_is_current(self) -> bool:
        return not await self._is_closed()

    async def until(self, condition: Callable[[], Any], limit_s: float = 600.0) -> None:
        """Wait in virtual time until an async condition holds, or fail."""
        async with asyncio.timeout(limit_s):
            while not await condition():
                self._raise_dead()
                await asyncio.sleep(0.01)

    async def all_ended(self) -> bool:
        states = [(await self.pool.status(request_id)).state for request_id in self.submitted]
        return all(state is OwnershipState.ENDED for state in states)

    async def finish(self) -> None:
        """Wait for every request to end and every slot to return, then stop all schedulers."""
        await self.until(self.all_ended)
        await self.until(self._is_idle)
        await self.stop()

    async def stop(self) -> None:
        for group in self.groups.values():
            if group.scheduler is not None and group.task is not None and not group.task.done():
                group.scheduler.stop()
                await group.task

    async def _is_idle(self) -> bool:
        return all(
            group.scheduler is None or group.scheduler.load().slots_reserved == 0 == group.engine.slots_in_use
            for group in self.groups.values()
            if group.task is not None and not group.task.done()
        )

    def _raise_dead(self) -> None:
        for group in self.groups.values():
            if group.task is not None and group.task.done() and not group.task.cancelled():
                group.task.result()

    async def log_of(self, request_id: str) -> tuple[list[int], End | None]:
        part = await self.pool.read(request_id, 0)
        return [token.id for token in part.tokens], part.end

    def expected(self, request: Request) -> tuple[list[int], FinishReason]:
        """Return the expected log of the request: the model's tokens up to EOS or length."""
        tokens: list[int] = []
        for index in range(request.max_new_tokens):
            tokens.append(self.tokens(request.id, index))
            if tokens[-1] in self.eos and not request.sampling.ignore_eos:
                return tokens, FinishReason.STOP
        return tokens, FinishReason.LENGTH


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on virtual time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        virtual_time.run(test(*args, **kwargs))

    return run


def a_simulation(**changes: Any) -> Simulation:
    """Return a simulation with these settings."""
    return Simulation(**({"tokens": seeded_tokens(1)} | changes))


def a_shape(**changes: int) -> EngineShape:
    """Return the shape of an engine, with defaults for all that a test does not name."""
    return EngineShape(**({"stages": 1, "slots": 64, "block_tokens": 4, "max_model_len": 64} | changes))


async def is_formed(group: Group) -> bool:
    """Return whether the group has formed."""
    assert group.scheduler is not None
    return group.scheduler.is_serving


def steps_of(group: Group, request_id: str) -> list[int]:
    """Numbers of the steps that held a request, from the iteration log."""
    return [record.step for record in group.records if request_id in [row.request_id for row in record.rows]]


async def serving(simulation: Simulation, group: Group) -> None:
    """Wait until the group serves."""
    await simulation.until(lambda: is_formed(group))


async def tokens_at_least(simulation: Simulation, request_id: str, count: int) -> None:
    """Wait until a request has this many tokens."""

    async def are_there() -> bool:
        return len((await simulation.log_of(request_id))[0]) >= count

    await simulation.until(are_there)
