"""What the checker reads of a system from outside: processes, logs, Redis, events."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import redis.asyncio
from waiting import wait_until

from checker.clients.sse import EventCutter, RawEvent
from checker.faults.injector import Injector, PlannedFault
from checker.history.records import Claimed, Fault, GroupNews, HistoryWriter, Opening, Ran
from checker.history.system_logs import read_deaths, read_iterations, read_logs
from checker.systems.pool_reader import LASTING, PREFIX, count_keys, read_log
from checker.systems.processes import find_parts, is_running, open_files, role_of
from checker.systems.system import System, wait_for
from orca.pool.redis import keys

PARENT = """
import subprocess, sys, pathlib
folder = pathlib.Path(sys.argv[1])
child = "import subprocess, sys, time; %s; print(1, flush=True); time.sleep(300)"
ranks = "ranks = [subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']) for _ in range(2)]"
for name, body in (("gateway", "pass"), ("worker-0.1", ranks)):
    subprocess.Popen([sys.executable, "-c", child % body], stdout=(folder / f"{name}.log").open("wb"))
subprocess.Popen([sys.executable, "-c", child % "pass", "redis-server"], stdout=(folder / "redis").open("wb"))
import time
time.sleep(300)
"""


class SmallSystem:
    """Stands for `orca up`: a gateway, a Redis, and a worker with two ranks, which only sleep."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)])
        self.checked = 0
        self.addresses = {"gateway": "127.0.0.1:8000"}

    def parts(self) -> dict[str, psutil.Process]:
        return find_parts(self.process.pid)

    def check_up(self) -> None:
        self.checked += 1


@pytest.fixture
def small_system(tmp_path: Path) -> Iterator[SmallSystem]:
    system = SmallSystem(tmp_path)
    try:
        wait_until(lambda: len(system.parts()) >= 5, limit_s=60, story=lambda: str(system.parts()))
        yield system
    finally:
        for child in psutil.Process(system.process.pid).children(recursive=True):
            child.kill()
        system.process.kill()
        system.process.wait()


def test_parts_are_told_by_the_logs_they_write_and_ranks_by_their_controller(small_system: SmallSystem) -> None:
    parts = small_system.parts()
    assert set(parts) == {"gateway", "redis", "worker-0.1", "rank-0.1.0", "rank-0.1.1"}
    assert {role_of(name) for name in parts} == {"gateway", "redis", "stage", "rank"}
    assert (open_files(parts["gateway"]) or 0) > 2


def test_a_supervisor_that_is_gone_has_no_parts() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert find_parts(process.pid) == {}


async def inject(
    folder: Path,
    system: SmallSystem,
    fault: PlannedFault,
    in_flight: Callable[[Collection[str]], tuple[str, ...]] = lambda _: ("c0",),
    *,
    limit_s: float = 30.0,
    settle_s: float = 0.0,
) -> tuple[bool, list[Fault]]:
    heard = iter(range(10**9))
    with HistoryWriter(folder / "history.jsonl") as history:
        injector = Injector(
            cast(System, system),
            history,
            in_flight=in_flight,
            tokens_heard=lambda: next(heard),
            settle_s=settle_s,
        )
        is_done = await injector.inject(fault, limit_s=limit_s)
    return is_done, [record for record in history.records if isinstance(record, Fault)]


def planned(*roles: str, kind: str = "kill", seconds: float = 0.0) -> PlannedFault:
    return PlannedFault(kind=kind, roles=roles, after_tokens=3, delay_s=0.0, choice=0.9, seconds=seconds)


async def test_a_kill_hits_the_parts_that_were_chosen_and_is_noted(tmp_path: Path, small_system: SmallSystem) -> None:
    before = small_system.parts()
    is_done, [fault] = await inject(tmp_path, small_system, planned("rank", "gateway"))
    assert is_done
    assert (fault.targets, fault.in_flight) == (("rank-0.1.1", "gateway"), ("c0",))
    await wait_for(lambda: not is_running(before["rank-0.1.1"]) and not is_running(before["gateway"]), 60, "two deaths")
    assert is_running(before["redis"])


async def test_all_at_once_hits_everything(tmp_path: Path, small_system: SmallSystem) -> None:
    before = small_system.parts()
    _, [fault] = await inject(tmp_path, small_system, planned("all"))
    assert set(fault.targets) == set(before)
    await wait_for(lambda: not any(map(is_running, before.values())), 60, "all deaths")


async def test_a_freeze_ends_by_itself(tmp_path: Path, small_system: SmallSystem) -> None:
    redis_process = small_system.parts()["redis"]
    freezing = asyncio.create_task(inject(tmp_path, small_system, planned("redis", kind="freeze", seconds=1.0)))
    await wait_for(lambda: redis_process.status() == psutil.STATUS_STOPPED, 60, "a freeze")
    await freezing
    await wait_for(lambda: redis_process.status() != psutil.STATUS_STOPPED, 60, "its end")


async def test_nothing_in_flight_means_no_fault(tmp_path: Path, small_system: SmallSystem) -> None:
    assert await inject(tmp_path, small_system, planned("redis"), in_flight=lambda _: (), limit_s=0.2) == (False, [])
    assert is_running(small_system.parts()["redis"])


async def test_a_gateway_is_hit_only_while_it_answers_somebody(tmp_path: Path, small_system: SmallSystem) -> None:
    elsewhere = {"127.0.0.1:8001": ("c0",)}

    def in_flight(gateways: Collection[str]) -> tuple[str, ...]:
        return sum((elsewhere.get(each, ()) for each in gateways), ()) if gateways else ("c0",)

    assert await inject(tmp_path, small_system, planned("gateway"), in_flight, limit_s=0.2) == (False, [])
    is_done, [fault] = await inject(tmp_path, small_system, planned("gateway", "redis"), in_flight)
    assert (is_done, fault.in_flight) == (True, ("c0",))


async def test_a_moment_that_passes_is_waited_for_again(tmp_path: Path, small_system: SmallSystem) -> None:
    answers = iter([("c0",), (), ("c1",), ("c1",)])
    is_done, [fault] = await inject(tmp_path, small_system, planned("redis"), in_flight=lambda _: next(answers))
    assert is_done
    assert fault.in_flight == ("c1",)


async def test_a_part_that_dies_too_often_is_left_in_peace(tmp_path: Path, small_system: SmallSystem) -> None:
    with HistoryWriter(tmp_path / "history.jsonl") as history:
        heard = iter(range(10**9))
        injector = Injector(
            cast(System, small_system), history, in_flight=lambda _: ("c0",), tokens_heard=lambda: next(heard)
        )
        freeze = planned("redis", kind="freeze")
        done = [await injector.inject(freeze, limit_s=limit_s) for limit_s in (30.0, 30.0, 30.0, 30.0, 0.5)]
    assert done == [True, True, True, True, False]


async def test_a_part_that_is_away_is_waited_for(tmp_path: Path, small_system: SmallSystem) -> None:
    small_system.parts()["gateway"].send_signal(signal.SIGKILL)
    await wait_for(lambda: "gateway" not in small_system.parts(), 60, "its death")
    assert await inject(tmp_path, small_system, planned("gateway"), limit_s=0.2) == (False, [])


async def test_a_part_that_has_only_started_is_spared_where_asked(tmp_path: Path, small_system: SmallSystem) -> None:
    assert await inject(tmp_path, small_system, planned("redis"), limit_s=0.2, settle_s=900.0) == (False, [])


def test_logs_become_claims_and_news_in_our_time(tmp_path: Path) -> None:
    lines = [
        '{"time":"1970-01-01T00:16:50.500000Z","message":"epoch over","epoch":1,"reason":"a rank died"}',
        '{"time":"1970-01-01T00:16:50.000000Z","message":"request claimed","request_id":"x.0","claim":1,"logged":4}',
        '{"time":"1970-01-01T00:16:51.000000Z","message":"something else"}',
        '{"time":"1970-01-01T00:16:5',
    ]
    (tmp_path / "scheduler-0.log").write_text("\n".join(lines))
    (tmp_path / "gateway.log").write_text(
        '{"time":"1970-01-01T00:16:52.000000Z","message":"pool away, streams wait: ConnectionError"}\n'
    )
    found = read_logs(tmp_path, Opening(at=100.0, seed=1, wall_s=1000.0))
    assert found == [
        Claimed(at=110.0, request="x.0", claim=1, logged=4),
        GroupNews(at=110.5, group="scheduler-0", what="over", epoch=1, reason="a rank died"),
        GroupNews(at=112.0, group="gateway", what="away"),
    ]


def test_deaths_are_read_from_what_orca_up_says_of_them() -> None:
    said = "1970-01-01T00:16:51.250Z redis was killed by SIGKILL; its log is x\n    a line\nrestarting redis\n"
    assert read_deaths(said, Opening(at=100.0, seed=1, wall_s=1000.0)) == [
        GroupNews(at=111.25, group="redis", what="death", reason="was killed by SIGKILL")
    ]


def test_iterations_count_since_a_moment_and_a_cut_line_is_passed(tmp_path: Path) -> None:
    rows = '"rows":[["b.0","increment",3,1],["a.0","initiation",0,3]]'
    lines = [
        '{"submitted_ns":1,"rows":[["old.0","increment",1,1]]}',
        '{"submitted_ns":9000000000,' + rows + "}",
        '{"rows":[["c',
    ]
    (tmp_path / "scheduler-0.jsonl").write_text("\n".join(lines))
    assert read_iterations(tmp_path, since=5.0, at=9.0) == Ran(at=9.0, requests=("a.0", "b.0"))


class FakePool:
    """The two calls of Redis that the checker makes."""

    def __init__(self, entries: list[tuple[bytes, dict[bytes, bytes]]], keys: tuple[str, ...] = ()) -> None:
        self._entries = entries
        self._keys = keys

    async def xrange(self, _: str) -> Any:
        return self._entries

    async def scan_iter(self, _: str, **__: int) -> Any:
        for key in self._keys:
            yield key.encode()


def pool(*entries: tuple[bytes, dict[bytes, bytes]], keys: tuple[str, ...] = ()) -> redis.asyncio.Redis:
    return cast(redis.asyncio.Redis, FakePool(list(entries), keys))


END = {b"end": b"length", b"count": b"2"}


async def test_a_log_is_read_with_its_end_and_both_forms_of_tokens() -> None:
    packed = b"L" + (300).to_bytes(4, "little") + b"\0"
    signed = {b"token": packed, b"claim": b"3"}
    log = await read_log(pool((b"1-0", {b"token": b"17"}), (b"2-0", signed), (b"3-0", END)), "x.0", at=1.0)
    assert log is not None
    assert log.claims == (3,)
    assert (log.tokens, log.reason, log.count, log.is_dense) == ((17, 300), "length", 2, True)


async def test_a_gap_in_a_log_and_a_token_behind_its_end_are_seen() -> None:
    gap = await read_log(pool((b"1-0", {b"token": b"17"}), (b"3-0", END)), "x.0", at=1.0)
    behind = await read_log(pool((b"1-0", END), (b"2-0", {b"token": b"17"})), "x.0", at=1.0)
    assert gap is not None
    assert behind is not None
    assert (gap.is_dense, behind.is_dense) == (False, False)
    assert await read_log(pool(), "x.0", at=1.0) is None


async def test_keys_are_counted_by_kind_without_those_that_last() -> None:
    keys = tuple(PREFIX + name for name in ("meta", "seat:g", "log:a", "log:b", "watch"))
    assert await count_keys(pool(keys=keys)) == {"keys log": 2.0, "keys watch": 1.0}


def test_events_are_cut_wherever_the_bytes_are() -> None:
    cutter, found = EventCutter(), []
    for byte in b"id: 0.1\ndata: a\n\ndata: [DONE]\n\ndata: never whole":
        found += cutter.feed(bytes([byte]))
    assert found == [RawEvent("0.1", "a"), RawEvent(None, "[DONE]")]


def test_only_keys_that_the_pool_keeps_beyond_all_requests_may_stay() -> None:
    rows = re.findall(r"^(\w+)(?::<\w+>)? +(?:hash|string|zset|set|stream) .*  (.+)$", keys.__doc__ or "", re.MULTILINE)
    lasting = {kind for kind, lifetime in rows if lifetime.startswith(("for ever", "while the lease lives", "a day"))}
    assert lasting == LASTING
