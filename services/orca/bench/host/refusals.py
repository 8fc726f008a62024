"""Measures what requests that are refused cost their neighbours: the gaps between the tokens of some clients.

Clients stream, in turn undisturbed and while bad prompts come: other work on the machine then slows both alike. The
gateway refuses one of each pair of bad prompts. The other one is put into the pool as an older gateway might have
stored it, so the scheduler refuses it. The client is this process.

Every answer is checked before there is a figure. The tokens of the clients are those of the engine, each bad prompt is
a 400 or ends as refused, and the group's epoch is the first one at the end.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import orjson

from orca.bench.client import EventStream, LoadTarget, post_bytes
from orca.bench.host.null_engine import expected_token
from orca.bench.host.parts import (
    DEPLOYMENT,
    HostFailed,
    running_gateway,
    running_redis,
    running_scheduler,
    wait_until_healthy,
)
from orca.core.domain.model import ModelInfo
from orca.core.domain.request import FinishReason, Request
from orca.planner.simulate.outcomes import percentile
from orca.planner.workload.trace import GREEDY
from orca.pool.records import LogSlice, OnDisconnect, Submission
from orca.pool.redis.pool import RedisPool, open_redis_pool
from orca.pool.settings import parse_pool_settings

ROUNDS = 5
"""Turns of an undisturbed phase and one with bad prompts."""
BUSY = 503
"""Other work on the machine makes the gateway late, and then it refuses new calls: they are sent again."""
POLL_S = 0.02
REFUSED_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalLoad:
    """The clients, and the bad prompts beside them."""

    clients: int = 8
    bad_prompts: int = 15  # of each kind; the same number in each round
    interval_s: float = 2.0  # from one pair of bad prompts to the next
    step_us: int
    new_tokens: int  # of one call; a client makes one call after the other
    prompt_tokens: int

    @property
    def bad_prompts_of_a_round(self) -> int:
        return self.bad_prompts // ROUNDS

    @property
    def phase_s(self) -> float:
        """The length of an undisturbed phase, and about that of one with bad prompts."""
        return self.bad_prompts_of_a_round * self.interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalFigures:
    """The gaps between two tokens of one call, over all clients: the 99th percentile of each phase, round by round."""

    clients: int
    bad_prompts: int
    interval_s: float
    step_us: int
    tokens: int  # of all phases
    undisturbed_p99_s: Sequence[float]
    disturbed_p99_s: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.disturbed_p99_s, self.undisturbed_p99_s, strict=True)
        return [disturbed / undisturbed for disturbed, undisturbed in pairs]


class NamedStream(EventStream):
    """A stream that keeps the name of its call: the engine's tokens depend on it."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self.parent = ""

    def _read_event(self, data: bytes, now_s: float) -> None:
        if not self.parent and data.startswith(b"{"):
            self.parent = orjson.loads(data).get("id", "")
        super()._read_event(data, now_s)


class _Clients:
    """Clients that stream without a pause during each phase of a kind, and what they saw."""

    def __init__(self, target: LoadTarget, model: ModelInfo, load: RefusalLoad) -> None:
        self._target, self._model, self._load = target, model, load
        self._is_over = False
        self._gaps_s: list[float] = []  # of the present phase
        self.p99_s: list[float] = []  # one for each phase
        self.tokens = 0

    async def run(self, until: asyncio.Future[None]) -> None:
        """Stream until `until` is done; calls in progress end first. Raises: HostFailed."""
        self._is_over, self._gaps_s = False, []
        streaming = [asyncio.ensure_future(self._stream()) for _ in range(self._load.clients)]
        try:
            await until
            self._is_over = True
            await asyncio.gather(*streaming)
            self.p99_s.append(percentile(sorted(self._gaps_s), 0.99))
        finally:
            for each in streaming:
                each.cancel()

    async def _stream(self) -> None:
        load, target = self._load, self._target
        prompt = [1] * load.prompt_tokens
        body = {"model": target.model, "prompt": prompt, "max_tokens": load.new_tokens, "temperature": 0}
        call = post_bytes(target, {**body, "ignore_eos": True, "stream": True, "return_token_ids": True})
        while not self._is_over:
            stream = NamedStream(call)
            await _answered(stream, target)
            if stream.status == BUSY:
                continue
            wanted = [
                expected_token(f"{stream.parent}.0", index, self._model.vocab_size) for index in range(load.new_tokens)
            ]
            if stream.error is not None or stream.token_ids != wanted:
                raise HostFailed(f"the stream of {stream.parent} does not have its engine's tokens: {stream.error}")
            self._gaps_s += [after - before for before, after in pairwise(stream.token_s)]
            self.tokens += len(wanted)


async def measure_refusals(model: ModelInfo, load: RefusalLoad, folder: Path) -> RefusalFigures:
    """Run all rounds and return their measurements. Raises: HostFailed."""
    with ExitStack() as stack:
        server = stack.enter_context(running_redis(folder))
        gateway = stack.enter_context(running_gateway(server, model, folder))
        scheduler = stack.enter_context(
            running_scheduler(server, model, folder, batch_size=2 * load.clients, step_us=load.step_us)
        )
        await wait_until_healthy(gateway)
        await scheduler.wait_until_seated()
        scheduler.start_group()
        pool = await open_redis_pool(server.redis.url, DEPLOYMENT, parse_pool_settings(server.environment))
        try:
            await _until_formed(pool)
            undisturbed, disturbed = (_Clients(gateway.target, model, load) for _ in range(2))
            for number in range(ROUNDS):
                await undisturbed.run(asyncio.ensure_future(asyncio.sleep(load.phase_s)))
                await disturbed.run(asyncio.ensure_future(_send_bad(pool, gateway.target, model, load, number)))
        finally:
            await pool.close()
        _check_epochs(folder / "scheduler-0.log")
    return RefusalFigures(
        clients=load.clients,
        bad_prompts=load.bad_prompts,
        interval_s=load.interval_s,
        step_us=load.step_us,
        tokens=undisturbed.tokens + disturbed.tokens,
        undisturbed_p99_s=undisturbed.p99_s,
        disturbed_p99_s=disturbed.p99_s,
    )


async def _until_formed(pool: RedisPool) -> None:
    while not (await pool.stats()).groups_formed:  # noqa: ASYNC110 - the pool sends no event
        await asyncio.sleep(POLL_S)


async def _send_bad(pool: RedisPool, target: LoadTarget, model: ModelInfo, load: RefusalLoad, round_: int) -> None:
    """Send the bad prompts of a round, one pair at a time. Raises: HostFailed if one is not refused."""
    for number in range(load.bad_prompts_of_a_round):
        await asyncio.sleep(load.interval_s)
        name = f"cmpl-bad-{round_}-{number}"
        await asyncio.gather(_refused_at_the_door(target, model), _refused_by_the_group(pool, model, name))


async def _refused_at_the_door(target: LoadTarget, model: ModelInfo) -> None:
    body = {"model": target.model, "prompt": [model.vocab_size], "max_tokens": 5}
    stream = EventStream(post_bytes(target, body))
    await _answered(stream, target)
    while stream.status == BUSY:
        stream = EventStream(post_bytes(target, body))
        await _answered(stream, target)
    if stream.status != 400:
        raise HostFailed(f"a bad prompt was answered with {stream.status} instead of 400")


async def _refused_by_the_group(pool: RedisPool, model: ModelInfo, name: str) -> None:
    request = Request(
        parent=name,
        choice=0,
        revision=model.revision,
        prompt=(1, model.vocab_size),
        max_new_tokens=5,
        sampling=GREEDY,
    )
    await pool.submit(
        Submission(parent=request.parent, requests=(request,), reader="r", on_disconnect=OnDisconnect.KEEP)
    )
    async with asyncio.timeout(REFUSED_WITHIN_S):
        while (log := await pool.read(request.id, 0)).end is None:  # noqa: ASYNC110 - as above
            await asyncio.sleep(POLL_S)
    _check_refused(request, log)


def _check_refused(request: Request, log: LogSlice) -> None:
    if log.tokens or log.end is None or log.end.reason is not FinishReason.REFUSED:
        raise HostFailed(f"{request.id} was not refused: it has {len(log.tokens)} tokens, and {log.end}")


async def _answered(stream: EventStream, target: LoadTarget) -> None:
    await asyncio.get_running_loop().create_connection(lambda: stream, target.host, target.port)
    try:
        await stream.ended
    finally:
        stream.close()


def _check_epochs(log: Path) -> None:
    """Check that the group formed once. Raises: HostFailed."""
    records = [orjson.loads(line) for line in log.read_bytes().splitlines() if line.startswith(b"{")]
    if over := [record.get("reason") for record in records if record.get("message") == "epoch over"]:
        raise HostFailed(f"a refused request must not end an epoch, and {len(over)} ended: {over[0]}")


def lines_of(runs: Sequence[RefusalFigures]) -> list[str]:
    """Return the figures as a table for a terminal."""
    if not runs:
        return []
    head = f"{'clients':>7}{'bad prompts':>13}{'every s':>9}{'p99 gap alone ms':>18}{'beside them ms':>16}{'ratio':>7}"
    rows = [
        f"{run.clients:>7}{2 * run.bad_prompts:>13}{run.interval_s:>9g}"
        f"{1e3 * median(run.undisturbed_p99_s):>18.1f}{1e3 * median(run.disturbed_p99_s):>16.1f}"
        f"{median(run.ratios):>7.2f}"
        for run in runs
    ]
    proven = "each bad prompt ended alone, no epoch ended, and every stream has its engine's tokens"
    return [f"Refused: {proven}. Medians of {ROUNDS} rounds.", head, *rows]
