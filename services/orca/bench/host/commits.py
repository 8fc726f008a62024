"""Measures how many tokens per second schedulers commit, and the processor time per token.

Requests are in the pool before the run, and the engines compute nothing. Every log is read back before there is a
figure: it must contain the tokens of the engine in order, and end once.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from time import perf_counter

from orca.bench.host.null_engine import expected_token
from orca.bench.host.parts import (
    DEPLOYMENT,
    HostFailed,
    NullScheduler,
    PoolServer,
    resident_bytes,
    running_redis,
    running_scheduler,
)
from orca.core.domain.model import ModelInfo
from orca.core.domain.request import End, FinishReason, Request
from orca.core.process.batched import batched
from orca.core.process.cpu_time import cpu_time_s
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import GREEDY
from orca.pool.records import OnDisconnect, OwnershipState, Submission
from orca.pool.redis.pool import RedisPool, open_redis_pool
from orca.pool.settings import parse_pool_settings

SUBMITTED_AT_ONCE = 32
CHOICES = 128
"""Requests of one call in the backlog: a call submits them all at once."""

BACKLOG_MIN = 10_000
"""Least size of a backlog whose memory is reported. A smaller one takes less memory than Redis uses for itself."""

POLL_S = 0.05
"""Pause between two polls of the pool for the end of the run; a poll costs Redis about 0.1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitLoad:
    """The work for the schedulers."""

    schedulers: int = 1  # one group each, all on one pool
    batch_size: int  # of each scheduler
    tokens: int  # least number of generated tokens: of whole requests, and of at least two full batches
    new_tokens: Range
    prompt_tokens: int
    step_us: int
    waiting: int = 0  # size of the backlog: further requests that wait and take free places in the batch
    seed: int = 0

    def requests(self, revision: str) -> list[Request]:
        """Return the measured requests: the run waits for their ends and checks their logs."""
        found: list[Request] = []
        chance, tokens = Random(self.seed), 0
        while tokens < self.tokens or len(found) < 2 * self.batch_size * self.schedulers:
            new_tokens = chance.randint(self.new_tokens.low, self.new_tokens.high)
            found.append(self._request(revision, f"cmpl-{len(found):032x}", 0, new_tokens))
            tokens += new_tokens
        return found

    def backlog(self, revision: str) -> Iterator[tuple[Request, ...]]:
        """Yield the requests that wait after the measured ones, one call at a time."""
        for number, choices in enumerate(batched(range(self.waiting), CHOICES)):
            parent = f"backlog-{number:032x}"
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
class CommitFigures:
    """The measurements of a run, from the forming of the groups to the last end."""

    schedulers: int
    batch_size: int  # of each scheduler
    step_us: int
    requests: int
    tokens: int
    least_tokens: int  # of the scheduler with the fewest
    steps: int
    seconds: float
    scheduler_s: float  # processor time of all schedulers
    redis_s: float  # processor time of Redis
    waiting: int
    waiting_bytes: int | None  # memory of Redis per waiting request; None if too few wait to measure it


async def measure_commits(model: ModelInfo, load: CommitLoad, folder: Path) -> CommitFigures:
    """Run the load once and return its measurements. Raises: HostFailed."""
    with running_redis(folder) as server:
        pool = await open_redis_pool(server.redis.url, DEPLOYMENT, parse_pool_settings(server.environment))
        try:
            await pool.set_revision(model.revision, 0)
            # The first promise scans all waiting requests. It comes once in a revision's life, so it is not measured.
            await pool.promise_slots(model.revision, model.max_model_len)
            requests = load.requests(model.revision)
            await _submit(pool, ((request,) for request in requests))
            before = resident_bytes(server.redis.pid)
            await _submit(pool, load.backlog(model.revision))
            backlog_bytes = resident_bytes(server.redis.pid) - before
            figures = await _run(pool, server, model, load, requests, folder)
            await _check(pool, requests, model.vocab_size, has_backlog=load.waiting > 0)
        finally:
            await pool.close()
    return replace(figures, waiting_bytes=backlog_bytes // load.waiting) if load.waiting >= BACKLOG_MIN else figures


async def _submit(pool: RedisPool, parents: Iterable[tuple[Request, ...]]) -> None:
    waiting = iter(parents)
    while some := list(islice(waiting, SUBMITTED_AT_ONCE)):
        submissions = [
            Submission(parent=choices[0].parent, requests=choices, reader="r", on_disconnect=OnDisconnect.KEEP)
            for choices in some
        ]
        await asyncio.gather(*map(pool.submit, submissions))


async def _run(
    pool: RedisPool, server: PoolServer, model: ModelInfo, load: CommitLoad, requests: Sequence[Request], folder: Path
) -> CommitFigures:
    sizes = {"batch_size": load.batch_size, "step_us": load.step_us}
    with ExitStack() as stack:
        schedulers = [
            stack.enter_context(running_scheduler(server, model, folder, number, **sizes))
            for number in range(load.schedulers)
        ]
        for scheduler in schedulers:
            await scheduler.wait_until_seated()
        await server.wait_until_quiet()
        pids = [server.redis.pid, *(scheduler.pid for scheduler in schedulers)]
        start_s, before = perf_counter(), [cpu_time_s(pid) for pid in pids]
        for scheduler in schedulers:
            scheduler.start_group()
        await _until_ended(pool, schedulers, requests)
        seconds = perf_counter() - start_s
        redis_s, *each_s = (cpu_time_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True))
        for scheduler in schedulers:
            scheduler.terminate()  # all at once: tokens that they draw from now on count, but the time does not
        ran = [await asyncio.to_thread(scheduler.wait_until_drained) for scheduler in schedulers]
        steps, tokens = zip(*ran, strict=True)
        return CommitFigures(
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
    """Wait until all measured requests have ended.

    The number of ends alone is no proof: one scheduler may end requests of the backlog while another one still runs
    measured requests.
    """
    running = list(requests)
    while running:
        for scheduler in schedulers:
            scheduler.check()
        if (await pool.stats()).ended_ever < len(requests):
            await asyncio.sleep(POLL_S)
            continue
        found = await asyncio.gather(*(pool.status(request.id) for request in running))
        pairs = zip(running, found, strict=True)
        running = [request for request, status in pairs if status.state is not OwnershipState.ENDED]


async def _check(pool: RedisPool, requests: Sequence[Request], vocab_size: int, *, has_backlog: bool) -> None:
    """Check that the logs contain the tokens of the engine. Raises: HostFailed if one does not."""
    for request in requests:
        count = request.max_new_tokens
        log = await pool.read(request.id, 0, limit=count + 1)
        wanted = [expected_token(request.id, index, vocab_size) for index in range(count)]
        # Token 0 may also have the number of its prompt's tokens that the prefix cache had.
        if [token.id for token in log.tokens] != wanted or log.end != End(FinishReason.LENGTH, count):
            raise HostFailed(f"the log of {request.id} does not contain the {count} tokens that its engine generated")
    # Some requests of a backlog may have ended too.
    if (ends := (await pool.stats()).ended_ever) != len(requests) and not has_backlog:
        raise HostFailed(f"{len(requests)} requests ended {ends} times")
