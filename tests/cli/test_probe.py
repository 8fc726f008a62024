"""Who counts as frozen, and what is done about it, with a part that answers when it is told to."""

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import waiting

from orca.cli.up.probe import Probe, Silence
from orca.cli.up.redis_child import RedisChild
from orca.cli.up.spec import ProcessSpec, Role
from orca.cli.up.supervisor import Child, Supervisor

PERIOD_S = 0.02

until = functools.partial(waiting.until, limit_s=90.0)

SERVES = """
import asyncio
from orca.core.process.internal_port import InternalPort

async def main():
    port = await InternalPort.open("127.0.0.1:{port}")
    await asyncio.sleep(600)

asyncio.run(main())
"""


class FakePart:
    """Answers as told, in no time; counts what is done about it."""

    def __init__(self, folder: Path) -> None:
        self.spec = ProcessSpec(role=Role.WORKER, name="worker-0.1", command=(), address="-", log=folder / "log")
        self.pid: int | None = 7
        self.answers: bool | None = True  # None: the question itself finds the asker standing still
        self.asked = 0
        self.unfrozen = 0
        self.clock_s = 0.0

    async def run_once(self) -> int:
        raise AssertionError("nobody starts it")

    async def stop(self) -> None:
        raise AssertionError("nobody stops it")

    def signal(self, number: signal.Signals) -> None:
        raise AssertionError(f"nobody sends it {number}")

    async def is_answering(self, within_s: float) -> bool:
        self.asked += 1
        self.clock_s += 100 if self.answers is None else within_s
        return bool(self.answers)

    def unfreeze(self) -> str:
        self.unfrozen += 1
        return "it is killed"


@contextlib.asynccontextmanager
async def probing(part: FakePart) -> AsyncIterator[list[str]]:
    """The sentences that are told while the part is probed."""
    told: list[str] = []
    probe = Probe([part], period_s=PERIOD_S, report=told.append, clock=lambda: part.clock_s)
    running = asyncio.create_task(probe.run())
    yield told
    running.cancel()


BOUND_S = 6.0


class Asked:
    """A part that is asked every 2 s: what is said of it after each question."""

    def __init__(self) -> None:
        self.silence = Silence(bound_s=BOUND_S)
        self.now_s = 100.0

    def question(self, *, is_answered: bool, took_s: float, pid: int | None = 7) -> bool:
        asked_s, self.now_s = self.now_s, self.now_s + took_s
        is_frozen = self.silence.record(pid, asked_s, self.now_s, is_answered=is_answered)
        self.now_s = max(self.now_s, asked_s + 2)
        return is_frozen

    def come_up(self) -> "Asked":
        assert not self.question(is_answered=True, took_s=0)
        return self


def test_no_answer_within_the_bound_is_a_freeze() -> None:
    asked = Asked().come_up()
    assert asked.silence.patience_s(asked.now_s) == BOUND_S
    assert asked.question(is_answered=False, took_s=BOUND_S)


def test_a_slow_answer_is_an_answer() -> None:
    asked = Asked().come_up()
    assert not any(asked.question(is_answered=True, took_s=5.9) for _ in range(20))


def test_a_part_that_refuses_its_connections_is_frozen_after_the_same_time() -> None:
    asked = Asked().come_up()
    assert [asked.question(is_answered=False, took_s=0) for _ in range(4)] == [False, False, False, True]
    assert asked.silence.patience_s(asked.now_s) == BOUND_S


def test_questions_after_the_first_are_waited_for_only_until_the_bound_is_over() -> None:
    asked = Asked().come_up()
    asked.question(is_answered=False, took_s=0)
    assert asked.silence.patience_s(asked.now_s) == BOUND_S - 2
    assert asked.question(is_answered=False, took_s=BOUND_S - 2)


def test_no_rounding_of_the_clock_keeps_a_freeze_from_its_end() -> None:
    """4.8 s and the bound make a time that is less than the bound behind 4.8 s."""
    start_s, bound_s = 4.8, 0.06
    silence = Silence(bound_s=bound_s)
    assert start_s + bound_s - start_s < bound_s
    silence.record(7, 0.0, start_s, is_answered=True)
    assert silence.record(7, start_s, start_s + bound_s, is_answered=False)


def test_an_answer_ends_the_silence() -> None:
    asked = Asked().come_up()
    for _ in range(5):
        assert not asked.question(is_answered=False, took_s=0)
        assert not asked.question(is_answered=False, took_s=0)
        assert not asked.question(is_answered=True, took_s=1)


def test_one_that_has_not_come_up_yet_may_be_silent_for_ever() -> None:
    asked = Asked()
    assert not any(asked.question(is_answered=False, took_s=BOUND_S) for _ in range(50))


def test_one_that_stays_frozen_gets_as_much_time_again() -> None:
    asked = Asked().come_up()
    assert asked.question(is_answered=False, took_s=BOUND_S)
    assert [asked.question(is_answered=False, took_s=0) for _ in range(4)] == [False, False, False, True]


def test_a_successor_has_to_come_up_first() -> None:
    asked = Asked().come_up()
    assert not asked.question(is_answered=False, took_s=0)
    assert not asked.question(is_answered=False, took_s=0, pid=None)
    assert not any(asked.question(is_answered=False, took_s=BOUND_S, pid=8) for _ in range(10))


async def test_a_frozen_part_is_named_with_its_bound_and_what_was_done(tmp_path: Path) -> None:
    part = FakePart(tmp_path)
    async with probing(part) as told:
        await until(lambda: part.asked >= 1)
        part.answers = False
        await until(lambda: told)
    assert told[0] == "worker-0.1 (pid 7) is frozen: it did not answer for 0.06 s; it is killed"
    assert part.unfrozen == len(told)


async def test_a_part_that_answers_is_left_alone(tmp_path: Path) -> None:
    part = FakePart(tmp_path)
    async with probing(part) as told:
        await until(lambda: part.asked >= 20)
    assert (told, part.unfrozen) == ([], 0)


async def test_while_the_supervisor_itself_stood_still_nobody_is_blamed(tmp_path: Path) -> None:
    part = FakePart(tmp_path)
    async with probing(part) as told:
        await until(lambda: part.asked >= 1)
        part.answers = None
        await until(lambda: part.asked >= 20)
    assert (told, part.unfrozen) == ([], 0)


async def test_a_period_of_nought_asks_nobody(tmp_path: Path) -> None:
    part = FakePart(tmp_path)
    await asyncio.wait_for(Probe([part], period_s=0.0, report=print).run(), 60)
    assert part.asked == 0


class Counted:
    """Counts the answers of a real process: a probe that has heard one has seen it come up."""

    answers = 0

    async def is_answering(self, within_s: float) -> bool:
        is_answered = await super().is_answering(within_s)  # type: ignore[misc]
        self.answers += is_answered
        return is_answered


class CountedChild(Counted, Child):
    pass


class CountedRedis(Counted, RedisChild):
    pass


async def test_a_stopped_process_is_killed_and_started_again(tmp_path: Path, unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    spec = ProcessSpec(
        role=Role.WORKER,
        name="worker",
        command=(sys.executable, "-c", SERVES.format(port=unused_tcp_port)),
        address=address,
        log=tmp_path / "log",
        health=address,
    )
    child, told = CountedChild(spec), []
    supervisor = Supervisor([child], report=told.append, restart_delays_s=(0.0,) * 9)
    # A long one: on a busy machine, who lives must not be taken for frozen.
    probe = Probe([child], period_s=1.0, report=told.append)
    running, probing = asyncio.create_task(supervisor.run()), asyncio.create_task(probe.run())
    await until(lambda: child.answers)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    await until(lambda: told)
    heard = child.answers
    await until(lambda: child.answers > heard)
    assert told[0] == f"worker (pid {first}) is frozen: it did not answer for 3 s; it is killed and started again"
    assert child.pid not in (None, first)
    probing.cancel()
    await supervisor.stop()
    await running


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[CountedRedis]:
    redis = CountedRedis(tmp_path / "redis", "d", fsync="everysec")
    yield redis
    await redis.stop()


async def test_a_stopped_redis_is_woken_and_not_killed(redis: CountedRedis) -> None:
    told: list[str] = []
    probing = asyncio.create_task(Probe([redis], period_s=0.2, report=told.append).run())
    pid = redis.pid
    assert pid is not None
    await until(lambda: redis.answers)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: told)
    assert await redis.is_answering(60.0)
    assert redis.pid == pid
    assert f"redis (pid {pid}) is frozen" in told[0]
    assert "resumed (SIGCONT)" in told[0]
    probing.cancel()


async def test_a_redis_that_is_gone_does_not_answer(redis: CountedRedis) -> None:
    await redis.stop()
    assert not await redis.is_answering(60.0)
