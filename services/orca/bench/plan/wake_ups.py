"""The time in which one process of a machine wakes another one: part of every step that several processes compute.

On a virtual machine that shares its processors, a process that sleeps may have to wait for the host. No profile knows
how often that will happen, so these times stand beside the errors of predictions.
"""

import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter_ns

from orca.planner.simulate.outcomes import percentile

_ROUNDS, _WARM_UP = 2_000, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUps:
    """Times from a message to its answer, in microseconds: both processes sleep until they get theirs."""

    median_us: float
    p90_us: float


def measure_wake_ups() -> WakeUps:
    """Send a byte to another process and back, many times."""
    own, others = multiprocessing.Pipe()
    echo = multiprocessing.get_context("spawn").Process(target=_echo, args=(others,), daemon=True)
    echo.start()
    others.close()
    times = []
    for _ in range(_WARM_UP + _ROUNDS):
        begin_ns = perf_counter_ns()
        own.send_bytes(b"x")
        own.recv_bytes()
        times.append((perf_counter_ns() - begin_ns) / 1000)
    own.close()
    echo.join()
    found = sorted(times[_WARM_UP:])
    return WakeUps(median_us=median(found), p90_us=percentile(found, 0.9))


def _echo(connection: Connection) -> None:
    """Answer each message until the other side closes its end."""
    try:
        while True:
            connection.send_bytes(connection.recv_bytes())
    except EOFError:
        return
