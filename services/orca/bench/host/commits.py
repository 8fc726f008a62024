"""How many tokens schedulers bring into the log, and what each costs: a pool filled beforehand, null engines.

Before a figure is given every log is read back: it must hold what the engine drew for it, in order, and end once.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from time import perf_counter

from orca.bench.host.null_engine import drawn
from orca.bench.host.parts import (
    DEPLOYMENT,
    HostFailed,
    NullScheduler,
    PoolServer,
    resident_bytes,
    running_redis,
    running_scheduler,
)
from orca.bench.trace import GREEDY, Range
from orca.core.domain.model import ModelInfo
from orca.core.domain.request import End, FinishReason, Request, Token
from orca.core.process.batched import batched
from orca.core.process.cpu_time import cpu_time_s
from orca.pool.records import OnDisconnect, OwnershipState, Submission
from orca.pool.redis.pool import RedisPool, open_redis_pool
from orca.pool.settings import parse_pool_settings

SUBMITTED_AT_ONCE = 32
CHOICES = 128
"""Of a parent of the crowd: a call submits so many at once."""

CROWD = 10_000
"""Requests that take more memory together than Redis takes for itself meanwhile."""

LOOK_S = 0.05
"""Between two looks at whether all is done; a look costs Redis some 0.1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What schedulers are given to do."""

    schedulers: int = 1  # a group each, of one pool
    batch_size: int  # of each
    tokens: int  # at least so many are generated, of whole requests and of two full batches at least
    new_tokens: Range
    prompt_tokens: int
    step_us: int
    waiting: int = 0  # requests behind those that are looked at: they take the places that become free, and wait
    seed: int = 0

    def requests(self, revision: str) -> list[Request]:
        """Those whose ends are waited for, and whose logs are checked."""
        found: list[Request] = []
        chance, tokens = Random(self.seed), 0
        while tokens < self.tokens or len(found) < 2 * self.batch_size * self.schedulers:
            new_tokens = chance.randint(self.new_tokens.low, self.new_tokens.high)
            found.append(self._request(revision, f"cmpl-{len(found):032x}", 0, new_tokens))
            tokens += new_tokens
        return found

    def crowd(self, revision: str) -> Iterator[tuple[Request, ...]]:
        """Those that wait behind them, a parent at a time."""
        for number, choices in enumerate(batched(range(self.waiting), CHOICES)):
            parent = f"crowd-{number:032x}"
            yield tuple(self._request(revision, parent, choice, self.new_tokens.high) for choice in range(len(choices)))

    def _request(self, revision: str, parent: str, choice: int, new_tokens: int) -> Request:
        return Request(
            parent=parent,
            choice=choice,
            revision=revision,
            prompt=(1,) * self.prompt_tokens,
            max_new_tokens=new_tokens,
            sampling=GREEDY,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What it took, from the forming of the groups to the last end."""

    schedulers: int
    batch_size: int  # of each
    step_us: int
    requests: int
    tokens: int
    least_tokens: int  # of the scheduler that drew the fewest
    steps: int
    seconds: float
    scheduler_s: float  # processor time of all of them, as the others
    redis_s: float
    waiting: int
    waiting_bytes: int | None  # of Redis' memory for each request that waits; None where too few do to tell


async def measure_commits(model: ModelInfo, load: Load, folder: Path) -> Committed:
    """Raises: HostFailed."""
    with running_redis(folder) as server:
        pool = await open_redis_pool(server.redis.url, DEPLOYMENT, parse_pool_settings(server.environment))
        try:
            await pool.set_revision(model.revision, 0)
            # The first promise looks at all that wait; it comes once in a revision's life, and is not measured.
            await pool.promise_slots(model.revision, model.max_model_len)
            requests = load.requests(model.revision)
            await _submit(pool, ((request,) for request in requests))
            before = resident_bytes(server.redis.pid)
            await _submit(pool, load.crowd(model.revision))
            crowd_bytes = resident_bytes(server.redis.pid) - before
            figures = await _run(pool, server, model, load, requests, folder)
            await _check(pool, requests, model.vocab_size, has_crowd=load.waiting > 0)
        finally:
            await pool.close()
    return replace(figures, waiting_bytes=crowd_bytes // load.waiting) if load.waiting >= CROWD else figures


async def _submit(pool: RedisPool, parents: Iterable[tuple[Request, ...]]) -> None:
    waiting = iter(parents)
    while some := list(islice(waiting, SUBMITTED_AT_ONCE)):
        submissions = [
            Submission(parent=choices[0].parent, requests=choices, reader="r", on_disconnect=OnDisconnect.KEEP)
            for choices in some
        ]
        await asyncio.gather(*map(pool.submit, submissions))


async def _run(
    pool: RedisPool, server: PoolServer, model: ModelInfo, load: Load, requests: Sequence[Request], folder: Path
) -> Committed:
    sizes = {"batch_size": load.batch_size, "step_us": load.step_us}
    with ExitStack() as stack:
        schedulers = [
            stack.enter_context(running_scheduler(server, model, folder, number, **sizes))
            for number in range(load.schedulers)
        ]
        for scheduler in schedulers:
            await scheduler.until_seated()
        await server.until_quiet()
        pids = [server.redis.pid, *(scheduler.pid for scheduler in schedulers)]
        start_s, before = perf_counter(), [cpu_time_s(pid) for pid in pids]
        for scheduler in schedulers:
            scheduler.go()
        await _until_ended(pool, schedulers, requests)
        seconds = perf_counter() - start_s
        redis_s, *each_s = (cpu_time_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True))
        for scheduler in schedulers:
            scheduler.end()  # all at once: what they draw from now on counts, but not its time
        ran = [await asyncio.to_thread(scheduler.drained) for scheduler in schedulers]
        steps, tokens = zip(*ran, strict=True)
        return Committed(
            **sizes,
            schedulers=load.schedulers,
            waiting=load.waiting,
            waiting_bytes=None,
            requests=len(requests),
            tokens=sum(tokens),
            least_tokens=min(tokens),
            steps=sum(steps),
            seconds=seconds,
            scheduler_s=sum(each_s),
            redis_s=redis_s,
        )


async def _until_ended(pool: RedisPool, schedulers: Sequence[NullScheduler], requests: Sequence[Request]) -> None:
    """Those of a crowd that one scheduler takes up may end before those that another one still runs."""
    running = list(requests)
    while running:
        for scheduler in schedulers:
            scheduler.check()
        if (await pool.stats()).ended_ever < len(requests):
            await asyncio.sleep(LOOK_S)
            continue
        found = await asyncio.gather(*(pool.status(request.id) for request in running))
        pairs = zip(running, found, strict=True)
        running = [request for request, status in pairs if status.state is not OwnershipState.ENDED]


async def _check(pool: RedisPool, requests: Sequence[Request], vocab_size: int, *, has_crowd: bool) -> None:
    """Raises: HostFailed when a log is not what was drawn."""
    for request in requests:
        count = request.max_new_tokens
        log = await pool.read(request.id, 0, limit=count + 1)
        wanted = tuple(Token(drawn(request.id, index, vocab_size)) for index in range(count))
        if log.tokens != wanted or log.end != End(FinishReason.LENGTH, count):
            raise HostFailed(f"the log of {request.id} does not hold the {count} tokens that were drawn for it")
    # Of a crowd some may have ended too.
    if (ends := (await pool.stats()).ended_ever) != len(requests) and not has_crowd:
        raise HostFailed(f"{len(requests)} requests ended {ends} times")
