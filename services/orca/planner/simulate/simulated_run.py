"""Runs a trace through the real scheduler: its loop, its policies and the in-memory pool, on simulated stages.

Everything runs on virtual time in this process. There is no client: a token counts as received when the commit that
contains it is done, because a gateway may read it from then on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import SettingError
from orca.core.domain.request import End, FinishReason, Request, reserved_slots
from orca.planner.simulate.outcomes import RequestOutcome, RunReport, summarise
from orca.planner.workload.trace import GREEDY, Trace, TraceRequest
from orca.pool.api import RequestPool
from orca.pool.memory.pool import MemoryPool
from orca.pool.memory.state import PoolClock, PoolState, RequestRecord
from orca.pool.order.order_rules import ClaimOrder, OrderRules
from orca.pool.records import Caller, ClaimAnswer, CommitAnswer, CommitEntry, OnDisconnect, Submission
from orca.pool.settings import PoolSettings
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.simulated_engine import SimulatedEngine, StageTime
from orca.scheduler.engines.step_cost import StepCost
from orca.scheduler.loop import GroupScheduler, SchedulingOptions
from orca.scheduler.observer import Observer, Observers
from orca.scheduler.order.claim_orders import ClaimOrders
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.policies import policy_of
from orca.scheduler.policy.policy import Policy
from orca.scheduler.policy.request_level import RequestLevelPolicy

OnArrival = Callable[[RequestPool, Request], Awaitable[None]]
"""Sees the pool and a request that comes now. Its waits are those of the run."""

Prompts = Callable[[TraceRequest], tuple[int, ...]]
"""Returns the prompt of a request. It is called when the request arrives."""

REVISION = "simulated"
CLAIM_MS_MAX = 1.0
"""Longest time of a claim's way to the pool if several groups claim. Each claim takes a random time up to this one."""


def without_content(request: TraceRequest) -> tuple[int, ...]:
    """Return a prompt for stages that share nothing, and so do not read it."""
    return (0,) * request.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated engine and the settings of its scheduler.

    Several groups claim from one pool. Each has such an engine, and `epoch.holder` of its events is its process
    (`process_of`). If two groups want the same request, chance decides which one is first, as it does on a network.
    """

    shape: EngineShape
    cost: StepCost | Sequence[StepCost]  # of every stage, or one for each
    host_us: int = 0  # of a result's way to the scheduler
    prefetch: int = 0
    max_batch_tokens: int | None = None  # of a step; prompts run in chunks then
    is_encoder_decoder: bool = False  # prompts are sources, and each target begins with one start token
    baseline: RequestLevelPolicy = field(default_factory=RequestLevelPolicy)  # the policy named `request_level`
    cycle: CycleControls | None = None  # the controls of the policy `rra`
    rules: OrderRules | None = None  # of the order of claims; None: arrival
    prefix_cache: bool = False  # requests begin with the KV blocks of others that have the same tokens
    groups: int = 1
    seed: int = 0  # of the chance between groups

    def measure(self, policy: str, max_batch_size: int, traces: Sequence[Trace]) -> Iterator[RunReport]:
        """Yield a report of each trace (see `sweep.Measure`). Raises: SettingError if the policy cannot run here."""
        for trace in traces:
            yield summarise(self.run(policy, max_batch_size, trace))

    def run(
        self,
        policy: str,
        max_batch_size: int,
        trace: Trace,
        observer: Observer | None = None,
        stage_times: list[StageTime] | None = None,
        is_over: asyncio.Event | None = None,
        on_arrival: OnArrival | None = None,
        prompts: Prompts = without_content,
    ) -> list[RequestOutcome]:
        """Run one trace.

        Args:
            observer: of all groups.
            stage_times: takes the time of each step on each stage of all groups.
            on_arrival: is called before each submission.
            is_over: ends the run when it is set, at the latest when all requests have ended. A request without an end
                then has an infinite `end_s`, and the tokens that it has got.
        Returns: an outcome per request, in order of arrival.
        """
        longest = trace.max_total_tokens + self.is_encoder_decoder
        needed = max(map(self._slots, trace.requests))
        if longest > self.shape.max_model_len or needed > self.shape.slots:
            raise SettingError(
                f"the trace has a request of {longest} tokens, and one that needs {needed} slots; the simulated engine "
                f"has {self.shape.slots} slots and a length of {self.shape.max_model_len}"
            )
        chosen = policy_of(policy, self.baseline)
        choices = SchedulingOptions(
            max_batch_size=max_batch_size,
            prefetch=self.prefetch,
            max_batch_tokens=self.max_batch_tokens,
            is_encoder_decoder=self.is_encoder_decoder,
            cycle=self.cycle if policy == "rra" else None,
            prefix_cache=self.prefix_cache,
        )
        if self.prefix_cache and (self.is_encoder_decoder or policy == "request_level"):
            raise SettingError("encoder-decoder models and the policy request_level share no prefixes")
        if (refusal := chosen.refuse(choices.limits(self.shape))) is not None:
            raise SettingError(f"{policy}: {refusal}")
        engines = [
            SimulatedEngine(self.shape, cost=self.cost, host_us=self.host_us, prefixes=choices.prefixes)
            for _ in range(self.groups)
        ]
        for engine in engines:
            engine.stage_times = stage_times
        arrivals = _Arrivals(trace, lambda request: self._request(request, prompts(request)), on_arrival)
        is_over = is_over or asyncio.Event()
        return virtual_time.run(self._run(chosen, engines, choices, arrivals, observer or Observer(), is_over))

    async def _run(
        self,
        policy: Policy,
        engines: Sequence[SimulatedEngine],
        choices: SchedulingOptions,
        arrivals: "_Arrivals",
        observer: Observer,
        is_over: asyncio.Event,
    ) -> list[RequestOutcome]:
        requests = arrivals.trace.requests
        pool = WatchedPool(len(requests), is_over, chance=Random(self.seed) if self.groups > 1 else None)
        schedulers = [
            GroupScheduler(self._dependencies(pool, engine, policy, group, observer), choices)
            for group, engine in enumerate(engines, 1)
        ]
        async with asyncio.TaskGroup() as tasks:
            for scheduler in schedulers:
                tasks.create_task(scheduler.run())
            await pool.is_served.wait()
            start_s = asyncio.get_running_loop().time()
            for request in requests:
                tasks.create_task(arrivals.submit_on_time(pool, request, start_s))
            await is_over.wait()
            for scheduler in schedulers:
                scheduler.stop()
        return [
            _outcome(request, pool.observed.get(parent_id(request), ObservedRequest()), start_s) for request in requests
        ]

    def _dependencies(
        self, pool: RequestPool, engine: SimulatedEngine, policy: Policy, group: int, observer: Observer
    ) -> Dependencies:
        orders = None if self.rules is None else ClaimOrders(self.rules)
        return Dependencies(
            pool=pool,
            engine=engine,
            policy=policy,
            caller=Caller(group=f"simulated-{group}", process=process_of(group), revision=REVISION),
            calls=count(1),
            clock_ns=virtual_time.VirtualClock().monotonic_ns,
            wall_ms=virtual_time.VirtualClock().wall_ms,
            observer=observer if orders is None else Observers([observer, orders.times]),
            orders=orders,
        )

    def _slots(self, request: TraceRequest) -> int:
        """Return the slots that a request needs for its whole length."""
        source_tokens = request.prompt_tokens if self.is_encoder_decoder else 0
        return reserved_slots(
            request.max_total_tokens + self.is_encoder_decoder, source_tokens, self.shape.block_tokens
        )

    def _request(self, trace_request: TraceRequest, prompt: tuple[int, ...]) -> Request:
        return Request(
            parent=parent_id(trace_request),
            choice=0,
            revision=REVISION,
            prompt=prompt,
            decoder_prefix=(0,) if self.is_encoder_decoder else (),
            max_new_tokens=trace_request.new_tokens,
            sampling=GREEDY,
            deadline_ms=trace_request.deadline_ms,
        )


@dataclass(slots=True)
class ObservedRequest:
    """The part of one request that has become readable; times of the loop's clock."""

    token_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: End | None = None
    end_s: float = inf


class WatchedPool(MemoryPool):
    """The in-memory pool on the running loop's clock; records the times of readable tokens and of ends."""

    def __init__(self, requests: int, is_done: asyncio.Event, *, chance: Random | None = None) -> None:
        """
        Args:
            is_done: is set when all of so many requests have ended.
            chance: of the time that a claim takes to get here; None: it takes none.
        """
        # A saturated trace arrives as a whole: no bound of a queue applies to it.
        unbounded = PoolSettings(max_queued=requests, max_queued_prompt_tokens=1 << 40, bytes_max=1 << 50)
        super().__init__(virtual_time.VirtualClock(), unbounded)
        self.state = _WatchedState(virtual_time.VirtualClock(), unbounded, on_end=self._observe_end)
        self.observed: dict[str, ObservedRequest] = {}
        self.is_served = asyncio.Event()  # a formed group has set the revision
        self._is_done = is_done
        self._chance = chance
        self._unfinished = requests

    async def set_revision(self, revision: str, generation: int) -> str:
        current = await super().set_revision(revision, generation)
        self.is_served.set()
        return current

    async def claim(
        self,
        caller: Caller,
        call: int,
        *,
        free_slots: int,
        total_slots: int,
        block_tokens: int,
        most: int,
        order: ClaimOrder | None = None,
    ) -> ClaimAnswer:
        if self._chance is not None:
            await asyncio.sleep(self._chance.uniform(0, CLAIM_MS_MAX) / 1_000)
        return await super().claim(
            caller,
            call,
            free_slots=free_slots,
            total_slots=total_slots,
            block_tokens=block_tokens,
            most=most,
            order=order,
        )

    async def commit(self, entries: Sequence[CommitEntry]) -> list[CommitAnswer]:
        answers = await super().commit(entries)
        now_s = asyncio.get_running_loop().time()
        for entry, answer in zip(entries, answers, strict=True):
            if answer is CommitAnswer.APPLIED:
                self._observe(entry, now_s)
        return answers

    def _observe(self, entry: CommitEntry, now_s: float) -> None:
        observed_request = self.observed.setdefault(entry.request_id.rpartition(".")[0], ObservedRequest())
        observed_request.token_s += [now_s] * len(entry.tokens)
        observed_request.token_ids += [token.id for token in entry.tokens]

    def _observe_end(self, parent: str, end: End) -> None:
        observed_request = self.observed.setdefault(parent, ObservedRequest())
        observed_request.end, observed_request.end_s = end, asyncio.get_running_loop().time()
        self._unfinished -= 1
        if not self._unfinished:
            self._is_done.set()


class _WatchedState(PoolState):
    """The pool's state; reports each end, also those that no commit brings, such as that of a deadline."""

    def __init__(self, clock: PoolClock, settings: PoolSettings, *, on_end: Callable[[str, End], None]) -> None:
        super().__init__(clock, settings)
        self._on_end = on_end

    def end(self, record: RequestRecord, end: End) -> None:
        super().end(record, end)
        self._on_end(record.request.parent, end)


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """The requests of a run, submitted when they are due, as a gateway would."""

    trace: Trace
    request_of: Callable[[TraceRequest], Request]
    on_arrival: OnArrival | None

    async def submit_on_time(self, pool: WatchedPool, due: TraceRequest, start_s: float) -> None:
        """Submit a request when it is due. Args: start_s: time of the loop's clock at which the trace began."""
        await asyncio.sleep(start_s + due.arrival_s - asyncio.get_running_loop().time())
        request = self.request_of(due)
        if self.on_arrival is not None:
            await self.on_arrival(pool, request)
        await pool.submit(
            Submission(parent=request.parent, requests=(request,), reader="client", on_disconnect=OnDisconnect.KEEP)
        )


def process_of(group: int) -> str:
    """Return the scheduler process of a group. Args: group: from 1."""
    return f"simulated-{group}-1"


def parent_id(request: TraceRequest | RequestOutcome) -> str:
    """Return the parent of a trace's request in the pool."""
    return f"r{request.index}"


def _outcome(request: TraceRequest, observed_request: ObservedRequest, start_s: float) -> RequestOutcome:
    is_whole = (
        observed_request.end == End(FinishReason.LENGTH, request.new_tokens)
        and len(observed_request.token_s) == request.new_tokens
    )
    return RequestOutcome(
        index=request.index,
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
        arrival_s=request.arrival_s,
        sent_s=request.arrival_s,
        token_s=tuple(token_s - start_s for token_s in observed_request.token_s),
        token_ids=tuple(observed_request.token_ids),
        end_s=observed_request.end_s - start_s,
        error=None if is_whole else f"ended with {observed_request.end}",
    )
