"""What processes take of the machine's memory at most: read in /proc by somebody outside, while they run.

Two figures of each. `whole` is the kernel's own record (VmHWM): everything resident, pages of mapped files among it,
which are the libraries of Python and PyTorch, and weights while they are read. `anonymous` (RssAnon) is what the
process itself has written to: weights, KV cache, heap. The kernel keeps no record of that, so it is looked at every
`INTERVAL_S`, and a peak that is shorter may be missed.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from orca.bench.report import Outcome
from orca.core.domain.request import slots_needed

INTERVAL_S = 0.25
"""A look costs some 30 microseconds of processor time for each process."""


@dataclass(slots=True)
class Peak:
    """The most memory of one process, as far as it was looked at."""

    name: str
    whole_bytes: int = 0
    anonymous_bytes: int = 0

    def raise_to(self, whole_bytes: int, anonymous_bytes: int) -> None:
        self.whole_bytes = max(self.whole_bytes, whole_bytes)
        self.anonymous_bytes = max(self.anonymous_bytes, anonymous_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the ranks of a system are there to hold, all of them together."""

    weight_bytes: int
    kv_bytes_per_slot: int
    slots: int  # in use at a time, at most

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_slot * self.slots

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


class MemoryWatch:
    """Looks at a process and all its descendants from a thread, from `follow` to `stop`."""

    def __init__(self) -> None:
        self._peaks: dict[int, Peak] = {}
        self._others: set[int] = set()  # processes known to be none of them
        self._running: list[int] = []  # at the last look
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def follow(self, process: int) -> None:
        self._peaks[process] = Peak("")
        self._thread.start()

    def stop(self) -> None:
        """Look a last time: what comes later does not count. To be called while the processes run, if it can."""
        self._stop.set()
        self._thread.join()

    @property
    def peaks(self) -> list[Peak]:
        """Of each process that was seen, in the order of their start."""
        return [peak for peak in self._peaks.values() if peak.whole_bytes]

    @property
    def peaks_of_running(self) -> list[Peak]:
        """Of those that were there at the last look: what compiled something before it was ready is not among them."""
        return [self._peaks[process] for process in self._running]

    def _run(self) -> None:
        self._look()
        while not self._stop.wait(INTERVAL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        self._find_children()
        self._running = []
        for process, peak in list(self._peaks.items()):
            try:
                status = Path(f"/proc/{process}/status").read_text()
                command = Path(f"/proc/{process}/cmdline").read_bytes()
            except OSError:
                continue  # it has ended
            if sizes := sizes_of(status):
                self._running.append(process)
                peak.raise_to(*sizes)
                peak.name = name_of(command.decode(errors="replace").split("\0"))

    def _find_children(self) -> None:
        parents: dict[int, int] = {}
        for process in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
            if process not in self._peaks and process not in self._others:
                try:
                    parents[process] = parent_of(Path(f"/proc/{process}/stat").read_text())
                except OSError:
                    continue
        while ours := [process for process, parent in parents.items() if parent in self._peaks]:
            for process in ours:
                self._peaks[process] = Peak("")
                del parents[process]
        self._others |= parents.keys()


def sizes_of(status: str) -> tuple[int, int] | None:
    """Bytes resident at most and bytes anonymous now, from /proc/PID/status; None of one that is ending."""
    fields = dict(line.split(":", 1) for line in status.splitlines())
    if "VmHWM" not in fields:
        return None
    return int(fields["VmHWM"].split()[0]) * 1024, int(fields["RssAnon"].split()[0]) * 1024


def parent_of(stat: str) -> int:
    """From /proc/PID/stat: `PID (name) state parent ...`, where a name may hold anything."""
    return int(stat.rpartition(")")[2].split()[1])


def name_of(command: Sequence[str]) -> str:
    """What people call a process: the subcommand of `orca`, the last part of a Python module, or the program."""
    if "-m" in command[:-1]:
        module, *rest = command[command.index("-m") + 1 :]
        if module == "orca.cli.main" and rest:
            return rest[0]
        # `orca.core.process.gc_freeze` is what the module that it names begins with.
        return (rest[0] if module == "orca.core.process.gc_freeze" and rest else module).rpartition(".")[2]
    return Path(command[0].split(" ")[0]).name


def held_by_ranks(logs: Mapping[str, Iterable[bytes]], slots: int) -> Held:
    """What the ranks say in the logs of their stages when they have loaded, by file; a restart counts once."""
    weights: dict[tuple[str, str], int] = {}
    slot: dict[tuple[str, str], int] = {}
    for name, rows in logs.items():
        for row in rows:
            if b'"KV slots offered"' in row:
                line = orjson.loads(row)
                place = name, line["service"]
                weights[place], slot[place] = line["weight_bytes"], line["kv_bytes"] // line["slots"]
    return Held(weight_bytes=sum(weights.values()), kv_bytes_per_slot=sum(slot.values()), slots=slots)


def slots_in_use(outcomes: Sequence[Outcome], block_tokens: int) -> int:
    """KV slots in use at a time at most, as the client saw it: whole blocks from a request's first token to its last.

    It is what a cache has to hold; slots that are offered but were never written to take no memory.
    """
    changes: list[tuple[float, int]] = []
    for outcome in outcomes:
        held = 0
        for count, time_s in enumerate(outcome.token_s):
            now = slots_needed(outcome.prompt_tokens + count, block_tokens)
            changes.append((time_s, now - held))
            held = now
        changes.append((outcome.end_s, -held))
    most = current = 0
    for _, change in sorted(changes, key=lambda change: (change[0], -change[1])):
        current += change
        most = max(most, current)
    return most
