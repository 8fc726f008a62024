"""Finds the parts of a running `orca up` in the process table alone."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

CHILD_ENDS_WITHIN_S = 10.0


def find_parts(supervisor: int) -> dict[str, psutil.Process]:
    """Return the running parts of the system: redis, gateway, scheduler-0, worker-0.1, rank-0.1.0.

    The last number of a rank is its position by age among the ranks of its worker.
    """
    parts: dict[str, psutil.Process] = {}
    try:
        children = psutil.Process(supervisor).children()
    except psutil.NoSuchProcess:
        return parts
    for child in children:
        name = _name_of(child)
        if name is None:
            continue
        parts |= with_ranks(name, child)
    return parts


def with_ranks(name: str, process: psutil.Process) -> dict[str, psutil.Process]:
    """Return a part and, for a stage's controller, its ranks: worker-0.1 with rank-0.1.0 and so on, oldest first."""
    if not name.startswith("worker-"):
        return {name: process}
    rank = name.replace("worker", "rank")
    return {name: process, **{f"{rank}.{place}": found for place, found in enumerate(_ranks_of(process))}}


def end_child(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child that has the signal to end; kill it after `CHILD_ENDS_WITHIN_S`."""
    try:
        process.wait(CHILD_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def role_of(part: str) -> str:
    """Return the role of a part: `rank-0.1.0` -> `rank`; a worker is the controller of a stage -> `stage`."""
    role = part.partition("-")[0]
    return "stage" if role == "worker" else role


def is_running(process: psutil.Process) -> bool:
    """Does the process run? A zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def open_files(process: psutil.Process) -> int | None:
    """Return the number of open files of a process; None if it has ended."""
    try:
        return int(process.num_fds())
    except psutil.Error:
        return None


def _name_of(process: psutil.Process) -> str | None:
    """Return the name of a part: that of the log that it writes to. Redis is found by its program."""
    try:
        if any("redis-server" in word for word in process.cmdline()):
            return "redis"
        log = Path(f"/proc/{process.pid}/fd/1").readlink()
    except (psutil.Error, OSError):
        return None
    return log.stem if log.suffix == ".log" else None


def _ranks_of(controller: psutil.Process) -> Iterator[psutil.Process]:
    """Yield the ranks of a stage, oldest first."""
    try:
        yield from sorted(controller.children(), key=lambda child: child.create_time())
    except psutil.Error:
        return
