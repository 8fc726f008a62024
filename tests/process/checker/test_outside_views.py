"""The checker's view of a system's processes, and its faults."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from checker.faults.injector import Injector, PlannedFault
from checker.history.records import Fault, HistoryWriter
from checker.systems.processes import find_parts, is_running, open_files, role_of
from checker.systems.system import System, wait_for
from support.waiting import wait_until

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


def test_parts_are_identified_by_their_logs_and_ranks_by_their_controller(small_system: SmallSystem) -> None:
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
    received = iter(range(10**9))
    with HistoryWriter(folder / "history.jsonl") as history:
        injector = Injector(
            cast(System, system),
            history,
            in_flight=in_flight,
            tokens_received=lambda: next(received),
            settle_s=settle_s,
        )
        is_done = await injector.inject(fault, limit_s=limit_s)
    return is_done, [record for record in history.records if isinstance(record, Fault)]


def planned(*roles: str, kind: str = "kill", seconds: float = 0.0) -> PlannedFault:
    return PlannedFault(kind=kind, roles=roles, after_tokens=3, delay_s=0.0, choice=0.9, seconds=seconds)


async def test_a_kill_hits_the_chosen_parts_and_is_recorded(tmp_path: Path, small_system: SmallSystem) -> None:
    before = small_system.parts()
    is_done, [fault] = await inject(tmp_path, small_system, planned("rank", "gateway"))
    assert is_done
    assert (fault.targets, fault.in_flight) == (("rank-0.1.1", "gateway"), ("c0",))
    await wait_for(lambda: not is_running(before["rank-0.1.1"]) and not is_running(before["gateway"]), 60, "two deaths")
    assert is_running(before["redis"])


async def test_a_fault_of_all_parts_hits_every_part(tmp_path: Path, small_system: SmallSystem) -> None:
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


async def test_a_gateway_is_hit_only_while_it_answers_a_call(tmp_path: Path, small_system: SmallSystem) -> None:
    elsewhere = {"127.0.0.1:8001": ("c0",)}

    def in_flight(gateways: Collection[str]) -> tuple[str, ...]:
        return sum((elsewhere.get(each, ()) for each in gateways), ()) if gateways else ("c0",)

    assert await inject(tmp_path, small_system, planned("gateway"), in_flight, limit_s=0.2) == (False, [])
    is_done, [fault] = await inject(tmp_path, small_system, planned("gateway", "redis"), in_flight)
    assert (is_done, fault.in_flight) == (True, ("c0",))


async def test_a_missed_moment_is_waited_for_again(tmp_path: Path, small_system: SmallSystem) -> None:
    answers = iter([("c0",), (), ("c1",), ("c1",)])
    is_done, [fault] = await inject(tmp_path, small_system, planned("redis"), in_flight=lambda _: next(answers))
    assert is_done
    assert fault.in_flight == ("c1",)


async def test_a_part_that_dies_too_often_is_spared(tmp_path: Path, small_system: SmallSystem) -> None:
    with HistoryWriter(tmp_path / "history.jsonl") as history:
        received = iter(range(10**9))
        injector = Injector(
            cast(System, small_system),
            history,
            in_flight=lambda _: ("c0",),
            tokens_received=lambda: next(received),
        )
        freeze = planned("redis", kind="freeze")
        done = [await injector.inject(freeze, limit_s=limit_s) for limit_s in (30.0, 30.0, 30.0, 30.0, 0.5)]
    assert done == [True, True, True, True, False]


async def test_an_absent_part_is_waited_for(tmp_path: Path, small_system: SmallSystem) -> None:
    small_system.parts()["gateway"].send_signal(signal.SIGKILL)
    await wait_for(lambda: "gateway" not in small_system.parts(), 60, "its death")
    assert await inject(tmp_path, small_system, planned("gateway"), limit_s=0.2) == (False, [])


async def test_a_part_that_just_started_is_spared_if_asked(tmp_path: Path, small_system: SmallSystem) -> None:
    assert await inject(tmp_path, small_system, planned("redis"), limit_s=0.2, settle_s=900.0) == (False, [])
