"""The supervisor with small processes of our own in place of services."""

import asyncio
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from orca.cli.up.spec import ProcessSpec, Role
from orca.cli.up.supervisor import Child, Supervisor, SystemFailed, tail
from orca.core.process.parent_death import die_with_parent
from support import waiting
from support.cli.processes import is_running, wait_until_gone

until = functools.partial(waiting.until, limit_s=90.0)

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


class System:
    """A supervisor of Python snippets in a folder, run as a task."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[str] = []
        self.children: list[Child] = []

    def add(self, name: str, code: str, role: Role = Role.WORKER, **fields: object) -> Child:
        command = (sys.executable, "-c", code)
        log = self.folder / f"{name}.log"
        spec = ProcessSpec(role=role, name=name, command=command, address="-", log=log, **fields)  # type: ignore[arg-type]
        self.children.append(Child(spec))
        return self.children[-1]

    def start(self, *, was_up: bool = True, restart_delays_s: tuple[float, ...] = (0.0, 0.0)) -> None:
        self.supervisor = Supervisor(self.children, report=self.told.append, restart_delays_s=restart_delays_s)
        self.supervisor.was_up = was_up
        self.running = asyncio.create_task(self.supervisor.run())

    async def up(self) -> None:
        await until(lambda: all("up" in self.log(child) for child in self.children))

    def log(self, child: Child) -> str:
        return child.spec.log.read_text() if child.spec.log.exists() else ""


@pytest.fixture
async def system(tmp_path: Path):
    system = System(tmp_path)
    yield system
    system.supervisor.kill()
    with suppress(SystemFailed):
        await system.running


async def test_stop_ends_roles_in_order_and_run_returns(system: System) -> None:
    order = system.folder / "order"
    write = (
        f"import signal, sys; signal.signal(15, lambda *_: (open({str(order)!r}, 'a').write('{{}}\\n'), sys.exit())); "
    )
    for role in (Role.WORKER, Role.GATEWAY, Role.SCHEDULER):
        # None is killed for being slow on a busy machine.
        system.add(role.name, write.format(role.name) + SLEEP, role, stop_seconds=90.0)
    system.start()
    await system.up()
    await system.supervisor.stop()
    await system.running
    assert order.read_text().split() == ["GATEWAY", "SCHEDULER", "WORKER"]


async def test_a_process_that_ignores_sigterm_is_killed_when_its_time_is_over(system: System) -> None:
    child = system.add("stubborn", STUBBORN, stop_seconds=0.2)
    system.start()
    await system.up()
    await system.supervisor.stop()
    assert child.pid is None


async def test_a_process_that_dies_is_reported_with_its_log_and_restarted_under_its_name(system: System) -> None:
    child = system.add("worker-0.1", SLEEP, restart_arguments=("--again",))
    system.start()
    await system.up()
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: system.log(child).count("up") == 2)
    assert child.pid not in (None, first)
    assert psutil.Process(child.pid).cmdline()[-1] == "--again"
    assert system.told[0].startswith(f"worker-0.1 was killed by SIGKILL; its log is {child.spec.log}\n    up\n")


async def test_a_process_starts_again_at_once_by_another_spec(system: System) -> None:
    """However often: that is no crash."""
    child, other = system.add("scheduler-0", SLEEP), system.add("worker-0.0", SLEEP)
    system.start(restart_delays_s=(600.0,))
    await system.up()
    kept = other.pid
    for number in range(3):
        before = child.pid
        command = (sys.executable, "-c", SLEEP.replace("'up'", f"'up {number}'"))
        await system.supervisor.restart(child, dataclasses.replace(child.spec, command=command))
        await until(lambda number=number: f"up {number}" in system.log(child))
        assert child.pid not in (before, None)
    assert other.pid == kept
    assert system.told == ["restarting scheduler-0 with other options"] * 3


async def test_a_process_that_is_about_to_start_again_does_so_by_the_new_spec(system: System) -> None:
    child = system.add("scheduler-0", "import sys; sys.exit(3)")
    system.start(restart_delays_s=(1.0, 1.0))
    await until(lambda: system.told)
    await system.supervisor.restart(child, dataclasses.replace(child.spec, command=(sys.executable, "-c", SLEEP)))
    await system.up()


async def test_a_process_that_is_just_starting_starts_again_by_the_new_spec(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, is_starting, may_start = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()

    async def start_slowly(*words: str, **options: Any) -> asyncio.subprocess.Process:
        is_starting.set()
        await may_start.wait()
        return await start(*words, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_slowly)
    child = system.add("scheduler-0", SLEEP)
    system.start()
    await is_starting.wait()
    command = (sys.executable, "-c", SLEEP.replace("'up'", "'new'"))
    await system.supervisor.restart(child, dataclasses.replace(child.spec, command=command))
    may_start.set()
    await until(lambda: "new" in system.log(child))
    assert system.told == ["restarting scheduler-0 with other options"]


async def test_a_report_of_a_death_shows_warnings_of_that_life_and_no_lesser_lines(system: System) -> None:
    lines = ['{"level":"info","message":"fine"}', '{"level":"warning","message":"slow"}']
    child = system.add("worker", f"print({lines[0]!r}, {lines[1]!r}, sep='\\n', flush=True)")
    child.spec.log.write_text("of an earlier life\n")
    system.start()
    await until(lambda: system.told)
    first, *shown, last = system.told[0].splitlines()
    assert (first, last) == (f"worker exited with code 0; its log is {child.spec.log}", "restarting worker")
    assert shown == ["    Z slow"]


DIED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def log_of(folder: Path, *lines: str, last_write_s_before_death: float = 1.0) -> Path:
    log = folder / "log"
    log.write_text("".join(f"{line}\n" for line in lines))
    at = DIED.timestamp() - last_write_s_before_death
    os.utime(log, (at, at))
    return log


def test_old_log_lines_are_not_shown_as_the_cause_of_a_death(tmp_path: Path) -> None:
    old, new = (f'{{"time":"2026-01-02T03:0{at}Z","level":"warning","message":"w"}}' for at in ("3:50", "4:01"))
    assert tail(log_of(tmp_path, "before", old, new, "after"), 0, DIED) == ["    03:04:01Z w", "    after"]
    assert tail(log_of(tmp_path, new, "x", last_write_s_before_death=11.0), 0, DIED) == []


def test_log_lines_of_redis_have_an_age_too(tmp_path: Path) -> None:
    old, new = (f"7:M {(DIED - timedelta(seconds=age)).astimezone():%d %b %Y %H:%M:%S}.120 # said" for age in (60, 2))
    assert tail(log_of(tmp_path, old, new), 0, DIED) == [f"    {new}"]


async def test_children_of_a_dead_process_go_with_it(system: System) -> None:
    spawn = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    )
    child = system.add("worker", f"{spawn}; {SLEEP}")
    system.start()
    await system.up()
    rank = psutil.Process(int(system.log(child).split()[0]))
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: not is_running(rank))


async def test_a_crash_loop_ends_the_system_with_the_name_and_the_log(system: System) -> None:
    system.add("scheduler-0", "import sys; sys.exit('no reason')")
    system.start()
    with pytest.raises(SystemFailed, match=r"(?s)no reason.*scheduler-0 died 3 times in 60 s"):
        await system.running
    assert len(system.told) == 2


async def test_a_part_that_refuses_its_settings_later_is_retried_until_they_are_fixed(system: System) -> None:
    mended = system.folder / "mended"
    refusing = f"import os, sys; os.path.exists({str(mended)!r}) or sys.exit(2); {SLEEP}"
    child = system.add("gateway", refusing, Role.GATEWAY)
    system.start()
    await until(lambda: len(system.told) > 5)  # two restarts are all that a crash gets here
    assert not system.running.done()
    assert "gateway exited with code 2" in system.told[0]
    assert "is tried again until it accepts its settings" in system.told[0]
    mended.touch()
    await until(lambda: "up" in system.log(child))


async def test_a_process_that_exits_during_the_start_ends_it_with_its_own_message(
    system: System,
) -> None:
    system.add("worker-0.0", 'import sys; print(\'{"level":"error","message":"bad model"}\'); sys.exit(2)')
    system.start(was_up=False)
    with pytest.raises(SystemFailed, match=r"worker-0\.0 did not start: bad model\n") as failed:
        await system.running
    assert failed.value.exit_code == 2


def test_nothing_outlives_a_supervisor_that_is_killed() -> None:
    supervisor = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import subprocess
                from orca.core.process.parent_death import die_with_parent
                child = subprocess.Popen(die_with_parent(["sleep", "600"]), start_new_session=True)
                print(child.pid, flush=True)
                child.wait()
            """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with supervisor:
        assert supervisor.stdout is not None
        child = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    wait_until_gone([child])


def test_a_leashed_command_does_not_start_after_its_supervisor_ended() -> None:
    line = die_with_parent(["echo", "ran"])
    line[line.index(str(os.getpid()))] = "1"
    ran = subprocess.run(line, capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, b"")
