"""The speed of a machine at one moment. A virtual machine is faster at one time than at another, by up to a third.

As many processes as there are stages multiply matrices at the same time, as ranks do. Most rows are those of a decode
batch, the others are of a prompt, and no cache holds the weights. Between two measurements the processes sleep.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import fmean
from time import perf_counter

SECONDS = 0.5
"""Duration of one measurement."""

_MATRICES, _SIZE = 8, 1024
"""Weights of 32 MiB, more than a cache has room for."""

_ROWS = (8, 8, 64)
"""Rows of one round: most steps decode."""


class MachineSpeed:
    """Measures with processes that are there already; `running_speed` makes them."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def measure(self) -> float:
        """Return rounds per second, the mean of the processes."""
        for connection in self._connections:
            connection.send(None)
        return fmean(connection.recv() for connection in self._connections)


@contextmanager
def running_speed(processes: int) -> Iterator[MachineSpeed]:
    """Run so many processes with one thread each."""
    spawning = multiprocessing.get_context("spawn")
    pipes = [spawning.Pipe() for _ in range(processes)]
    workers = [spawning.Process(target=_multiply, args=(others,), daemon=True) for _, others in pipes]
    for worker in workers:
        worker.start()
    for own, others in pipes:
        others.close()
        own.recv()  # it is ready
    try:
        yield MachineSpeed([own for own, _ in pipes])
    finally:
        for own, _ in pipes:
            own.close()
        for worker in workers:
            worker.join()


def _multiply(connection: Connection) -> None:
    """Measure whenever asked, until the other side closes its end."""
    import torch

    torch.set_num_threads(1)
    weights = [torch.randn(_SIZE, _SIZE) for _ in range(_MATRICES)]
    rows = [torch.randn(count, _SIZE) for count in _ROWS]
    connection.send(None)
    try:
        while True:
            connection.recv()
            rounds, begin_s = 0, perf_counter()
            while (passed_s := perf_counter() - begin_s) < SECONDS:
                for some in rows:
                    for matrix in weights:
                        torch.mm(some, matrix)
                rounds += 1
            connection.send(rounds / passed_s)
    except EOFError:
        return
