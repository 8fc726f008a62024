"""The measuring processes of one tensor degree, as their parent sees them."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from statistics import fmean, median
from typing import Any

import orjson

from orca.core.domain.errors import EngineError, ModelError, OrcaError, SettingError
from orca.core.process.parent_death import die_with_parent
from orca.planner.profile.measuring.points import Point, View
from orca.planner.profile.measuring.process_order import ProcessFacts, ProcessOrder, StepTime
from orca.worker.machine import thread_variables

_START_NS = 1_000_000
"""Time until a common start: longer than an order takes to all processes."""
_COMMAND = (sys.executable, "-m", "orca.planner.profile.measuring.process")
_ERRORS: dict[str, type[OrcaError]] = {each.__name__: each for each in (ModelError, SettingError)}


class Processes:
    """Processes that time the same steps at the same time. In each group of `ranks` of them, the first one samples."""

    def __init__(self, connections: Sequence[Connection], ranks: int) -> None:
        self._connections = connections
        self._ranks = ranks
        self.facts = next(map(ProcessFacts.of, self._receive()))

    def visit(self, index: int, point: Point, repeats: int) -> StepTime:
        """Run a point on all processes, and time it.

        Args:
            index: of the point in the list of all points.
            repeats: after the first run, of which the median counts; 0: the first run itself counts.
        Returns: the mean over all groups.
        """
        first = self._order(index, repeats=0, start_ns=0)[:: self._ranks]
        if not repeats:
            return _mean([StepTime(*times[0]) for times in first])
        start_ns = time.monotonic_ns() + _START_NS if len(self._connections) > 1 else 0
        times = self._order(index, repeats=repeats, start_ns=start_ns)
        if point.view is View.SEND:
            left, arrived = times[:2]
            took = [max(0.0, (end - begin) / 1000) for [begin], [end] in zip(left, arrived, strict=True)]
            return StepTime(median(took), median(took))
        groups = [[StepTime(*each) for each in own] for own in times[:: self._ranks]]
        return _mean([_median(own) for own in groups])

    def _order(self, index: int, *, repeats: int, start_ns: int) -> list[list[list[float]]]:
        order = orjson.dumps({"point": index, "repeats": repeats, "start_ns": start_ns})
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the process has died: its answer is missing, too
                connection.send_bytes(order)
        return [content["times"] for content in self._receive()]

    def _receive(self) -> list[dict[str, Any]]:
        """Return an answer of each process.

        Raises: ModelError, SettingError; EngineError as soon as one process failed, because others may wait for it.
        """
        contents: dict[Connection, dict[str, Any]] = {}
        while missing := [each for each in self._connections if each not in contents]:
            for connection in wait(missing):
                assert isinstance(connection, Connection)
                number = self._connections.index(connection)
                try:
                    contents[connection] = orjson.loads(connection.recv_bytes())
                except (EOFError, OSError) as error:
                    raise EngineError(f"measuring process {number} has died: see its output above") from error
                _raise_error(contents[connection])
        return [contents[each] for each in self._connections]


def _raise_error(content: dict[str, Any]) -> None:
    """Raises: ModelError, SettingError, EngineError if an answer is one."""
    if "error" not in content:
        return
    kind = _ERRORS.get(content["kind"])
    if kind is None:
        raise EngineError(f"a measuring process failed: {content['kind']}: {content['error']}")
    raise kind(content["error"])


@contextmanager
def running(orders: Sequence[ProcessOrder]) -> Iterator[Processes]:
    """Run a process for each order, until the context ends; then all are killed.

    Raises: as Processes does.
    """
    with ExitStack() as stack:
        connections = []
        for order in orders:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    die_with_parent([*_COMMAND, str(theirs.fileno())]),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                    env=os.environ | thread_variables(order.threads),
                )
            stack.callback(_end, process)
            connection = Connection(ours.detach())
            stack.callback(connection.close)
            connection.send_bytes(orjson.dumps(asdict(order)))
            connections.append(connection)
        yield Processes(connections, orders[0].bounds["ranks"])


def _mean(times: Sequence[StepTime]) -> StepTime:
    return StepTime(*(fmean(each) for each in zip(*times, strict=True)))


def _median(times: Sequence[StepTime]) -> StepTime:
    return StepTime(*(median(each) for each in zip(*times, strict=True)))


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
