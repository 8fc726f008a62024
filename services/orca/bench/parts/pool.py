"""Measure the pool on this machine: python -m orca.bench.parts.pool [WAITING ...]

It prints the median time, and the server's own time, of the transitions on the request path while WAITING requests wait
(0, 10,000 and 100,000 by default). It also prints those of commits of 1, 32 and 256 tokens, those of a commit that ends
a request, and the memory of a waiting request and of a log. The server is the first redis-server that
`find_redis_server` finds. There is no target.

With `--orders` it measures claims by arrival and by order deadline instead, and the memory of the index of waiting
requests (ordered_claims.py). By default 1,000, 100,000 and 1,000,000 requests wait then.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from orca.bench.deadlines import ordered_claims
from orca.bench.options import add_figures_option, write_figures
from orca.core.domain.request import End, FinishReason, Request, SamplingParams, Token
from orca.pool.records import Caller, Claimed, CommitEntry, OnDisconnect, Submission
from orca.pool.redis.embedded import EmbeddedRedis, find_redis_server
from orca.pool.redis.pool import RedisPool, open_redis_pool
from orca.pool.settings import PoolSettings

CALLER = Caller(group="g", process="p", revision="r")
SLOTS: dict[str, Any] = {"free_slots": 10**9, "total_slots": 10**9, "block_tokens": 16}
PROMPT = tuple(range(100, 164))
ENDS = 2_000
"""Requests that end one by one. Each has another length, as answers have."""


def submission(number: int) -> Submission:
    parent = f"cmpl-{number:032x}"
    request = Request(
        parent=parent, choice=0, revision="r", prompt=PROMPT, max_new_tokens=500, sampling=SamplingParams()
    )
    render = '{"kind":"chat","model":"m","created":1700000000,"stream":true}'
    return Submission(parent=parent, requests=(request,), reader="g1/1", on_disconnect=OnDisconnect.KEEP, render=render)


async def report(redis: Redis, name: str, call: Callable[[int], Awaitable[Any]], times: int = 100) -> None:
    """Print the median of `times` calls, each given its number from 0, and the mean of the server's own time for one.

    On a busy machine callers wait for a processor, so there the server's time shows the cost of a transition.
    """
    await redis.config_resetstat()
    took = []
    for number in range(times):
        start = time.perf_counter()
        await call(number)
        took.append(time.perf_counter() - start)
    evalsha = (await redis.info("commandstats"))["cmdstat_evalsha"]
    p50, p99 = statistics.median(took), sorted(took)[times * 99 // 100]
    server = f"server {evalsha['usec_per_call'] / 1e3:6.3f} ms"
    print(f"{name:<32} p50 {p50 * 1e3:6.2f} ms   p99 {p99 * 1e3:6.2f} ms   {server}")


async def used_bytes(redis: Redis) -> int:
    """Return the memory of the data alone: buffers of connections and of the append-only file come and go."""
    return int((await redis.info("memory"))["used_memory_dataset"])


async def measure(pool: RedisPool, redis: Redis, levels: list[int]) -> None:
    calls, requests = itertools.count(2), itertools.count()
    await pool.set_revision("r", 1)
    await pool.enter(CALLER, 1, reported_epoch=0)
    empty = await used_bytes(redis)
    for level in levels:
        while (waiting := (await pool.stats()).queued) < level:
            await asyncio.gather(*(pool.submit(submission(next(requests))) for _ in range(min(16, level - waiting))))
        await pool.heartbeat(CALLER)
        if level and empty:
            print(f"bytes per waiting request        {(await used_bytes(redis) - empty) / level:.0f}")
            empty = 0  # from here on requests are owned as well
        await report(redis, f"submit, {level} waiting", lambda _: pool.submit(submission(next(requests))))
        await report(redis, f"claim of 1, {level} waiting", lambda _: pool.claim(CALLER, next(calls), most=1, **SLOTS))
    for size in (1, 32, 256):
        await asyncio.gather(*(pool.submit(submission(next(requests))) for _ in range(size)))
        await pool.heartbeat(CALLER)
        claimed = (await pool.claim(CALLER, next(calls), most=size, **SLOTS)).claimed

        async def commit(index: int) -> None:
            entries = [
                CommitEntry(request_id=one.request.id, claim=one.claim, index=index, tokens=(Token(40_000 + index),))
                for one in claimed  # noqa: B023 - used before the next turn only
            ]
            await pool.commit(entries)

        before = await used_bytes(redis)
        # The logs are long and of many requests: compared with them, the size of a buffer does not matter.
        times = 400 if size == 256 else 100
        await report(redis, f"commit of {size}", commit, times)
        if size == 256:
            print(
                f"bytes per token of {times}          {(await used_bytes(redis) - before) / times / len(claimed):.1f}"
            )

    await measure_ends(pool, redis, calls, requests)


async def measure_ends(pool: RedisPool, redis: Redis, calls: Iterator[int], requests: Iterator[int]) -> None:
    await asyncio.gather(*(pool.submit(submission(next(requests))) for _ in range(ENDS)))
    await pool.heartbeat(CALLER)
    claimed = (await pool.claim(CALLER, next(calls), most=ENDS, **SLOTS)).claimed
    lengths = [1 + number * 37 % 400 for number in range(ENDS)]
    for start in range(0, ENDS, 100):
        ones = list(zip(claimed, lengths, strict=True))[start : start + 100]
        await pool.commit([entry_of(one, 0, length - 1) for one, length in ones if length > 1])

    async def end(number: int) -> None:
        one, length = claimed[number], lengths[number]
        reason = FinishReason.LENGTH if number % 4 == 0 else FinishReason.STOP
        await pool.commit([entry_of(one, length - 1, 1, End(reason, length))])

    await report(redis, "commit that ends a request", end, ENDS)


def entry_of(one: Claimed, index: int, tokens: int, end: End | None = None) -> CommitEntry:
    values = tuple(Token(40_000 + index + i) for i in range(tokens))
    return CommitEntry(request_id=one.request.id, claim=one.claim, index=index, tokens=values, end=end)


async def main(levels: list[int]) -> None:
    settings = PoolSettings(max_queued=10**7, bytes_max=10**12)
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        redis = Redis.from_url(server.url)
        print(f"{find_redis_server()}, Redis {(await redis.info('server'))['redis_version']}")
        pool = await open_redis_pool(server.url, "measured", settings)
        await measure(pool, redis, levels)
        await pool.close()
        await redis.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", type=int, nargs="*", metavar="WAITING")
    parser.add_argument("--orders", action="store_true", help="measure claims by arrival and by order deadline")
    add_figures_option(parser)
    options = parser.parse_args()
    options.words = ["python", "-m", "orca.bench.parts.pool", *sys.argv[1:]]
    if options.orders:
        found = ordered_claims.measure(options.levels or ordered_claims.LEVELS)
        print("\n".join(ordered_claims.lines(found)))
        write_figures(options, ordered_claims.figures(found))
    elif options.figures is not None:
        parser.error("--figures needs --orders")
    else:
        asyncio.run(main(options.levels or [0, 10_000, 100_000]))
