"""Runs a trace through the real scheduler: its loop, its policies and the in-memory pool, on simulated stages.

Everything runs on virtual time in this process. There is no client: a token counts as received when the commit that
contains it is done, because a gateway may read it from then on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from orca.core.domain.engine import EngineShape
from orca.core.domain.errors import SettingError
from orca.core.domain.request import End, FinishReason, Request
from orca.planner.simulate.outcomes import RequestOutcome, RunReport, summarise
from orca.planner.workload.trace import GREEDY, Trace, TraceRequest
from orca.pool.api import RequestPool
from orca.pool.memory.pool import MemoryPool
from orca.pool.memory.state import PoolClock, PoolState, RequestRecord
from orca.pool.order.order_rules import OrderRules
from orca.pool.records import Caller, CommitAnswer, CommitEntry, OnDisconnect, Submission
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

CALLER = Caller(group="simulated", process="simulated-1", revision="simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated engine and the settings of its scheduler."""

    shape: EngineShape
    cost: StepCost | Sequence[StepCost]  # of every stage, or one for each
    host_us: int = 0  # of a result's way to the scheduler
    prefetch: int = 0
    max_batch_tokens: int | None = None  # of a step; prompts run in chunks then
    is_encoder_decoder: bool = False  # prompts are sources, and each target begins with one start token
    baseline: RequestLevelPolicy = field(default_factory=RequestLevelPolicy)  # the policy named `request_level`
    cycle: CycleControls | None = None  # the controls of the policy `rra`
    rules: OrderRules | None = None  # of the order of claims; None: arrival

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
    ) -> list[RequestOutcome]:
        """Run one trace.

        Args:
            stage_times: takes the time of each step on each stage.
            on_arrival: is called before each submission.
            is_over: ends the run when it is set, at the latest when all requests have ended. A request without an end
                then has an infinite `end_s`, and the tokens that it has got.
        Returns: an outcome per request, in order of arrival.
        """
        longest = trace.max_total_tokens + self.is_encoder_decoder
        needed = max(self._request(request).slots(self.shape.block_tokens) for request in trace.requests)
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
        )
        if (refusal := chosen.refuse(choices.limits(self.shape))) is not None:
            raise SettingError(f"{policy}: {refusal}")
        engine = SimulatedEngine(self.shape, cost=self.cost, host_us=self.host_us)
        engine.stage_times = stage_times
        is_over = is_over or asyncio.Event()
        return virtual_time.run(self._run(chosen, engine, choices, trace, observer or Observer(), is_over, on_arrival))

    async def _run(
        self,
        policy: Policy,
        engine: SimulatedEngine,
        choices: SchedulingOptions,
        trace: Trace,
        observer: Observer,
        is_over: asyncio.Event,
        on_arrival: OnArrival | None,
    ) -> list[RequestOutcome]:
        pool = WatchedPool(len(trace.requests), is_over)
        orders = None if self.rules is None else ClaimOrders(self.rules)
        dependencies = Dependencies(
            pool=pool,
            engine=engine,
            policy=policy,
            caller=CALLER,
            calls=count(1),
            clock_ns=virtual_time.VirtualClock().monotonic_ns,
            wall_ms=virtual_time.VirtualClock().wall_ms,
            observer=observer if orders is None else Observers([observer, orders.times]),
            orders=orders,
        )
        scheduler = GroupScheduler(dependencies, choices)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(scheduler.run())
            await pool.is_served.wait()
            start_s = asyncio.get_running_loop().time()
            for request in trace.requests:
                due_s = start_s + request.arrival_s
                tasks.create_task(_submit_on_time(pool, self._request(request), due_s, on_arrival))
            await is_over.wait()
            scheduler.stop()
        return [
            _outcome(request, pool.observed.get(parent_id(request), ObservedRequest()), start_s)
            for request in trace.requests
        ]

    def _request(self, trace_request: TraceRequest) -> Request:
        return Request(
            parent=parent_id(trace_request),
            choice=0,
            revision=CALLER.revision,
            prompt=(0,) * trace_request.prompt_tokens,  # simulated stages do not read it
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

    def __init__(self, requests: int, is_done: asyncio.Event) -> None:
        """Args: is_done: is set when all of so many requests have ended."""
        # A saturated trace arrives as a whole: no bound of a queue applies to it.
        unbounded = PoolSettings(max_queued=requests, max_queued_prompt_tokens=1 << 40, bytes_max=1 << 50)
        super().__init__(virtual_time.VirtualClock(), unbounded)
        self.state = _WatchedState(virtual_time.VirtualClock(), unbounded, on_end=self._observe_end)
        self.observed: dict[str, ObservedRequest] = {}
        self.is_served = asyncio.Event()  # a formed group has set the revision
        self._is_done = is_done
        self._unfinished = requests

    async def set_revision(self, revision: str, generation: int) -> str:
        current = await super().set_revision(revision, generation)
        self.is_served.set()
        return current

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


async def _submit_on_time(pool: WatchedPool, request: Request, due_s: float, on_arrival: OnArrival | None) -> None:
    """Submit a request when it is due, as a gateway would."""
    await asyncio.sleep(due_s - asyncio.get_running_loop().time())
    if on_arrival is not None:
        await on_arrival(pool, request)
    await pool.submit(
        Submission(parent=request.parent, requests=(request,), reader="client", on_disconnect=OnDisconnect.KEEP)
    )


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
