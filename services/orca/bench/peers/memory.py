"""Measures the peak memory of processes: reads /proc from outside while they run.

There are two figures per process. `whole` is the kernel's own peak (VmHWM) of everything resident. It includes pages of
mapped files, such as the libraries of Python and PyTorch, and weights while they are read. `anonymous` (RssAnon) is the
memory that the process itself has written: weights, KV cache, heap. The kernel has no peak of it, so it is sampled
every `INTERVAL_S`, and a shorter peak may be missed.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from orca.core.domain.request import slots_needed
from orca.planner.simulate.outcomes import RequestOutcome

INTERVAL_S = 0.25
"""A sample costs about 30 microseconds of processor time per process."""


@dataclass(slots=True)
class ProcessPeak:
    """The peak memory of one process over all samples."""

    name: str
    whole_bytes: int = 0
    anonymous_bytes: int = 0

    def raise_to(self, whole_bytes: int, anonymous_bytes: int) -> None:
        self.whole_bytes = max(self.whole_bytes, whole_bytes)
        self.anonymous_bytes = max(self.anonymous_bytes, anonymous_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory that all ranks of a system together need for weights and KV."""

    weight_bytes: int
    kv_bytes_per_slot: int
    slots: int  # most slots in use at any time

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_slot * self.slots

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


class MemoryWatch:
    """A thread that samples a process and all its descendants, from `follow` to `stop`."""

    def __init__(self) -> None:
        self._peaks: dict[int, ProcessPeak] = {}
        self._unrelated: set[int] = set()  # processes that are known not to be descendants
        self._running: list[int] = []  # at the last sample
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def follow(self, process: int) -> None:
        self._peaks[process] = ProcessPeak("")
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end. Call it while the processes still run, if possible."""
        self._stop.set()
        self._thread.join()

    @property
    def peaks(self) -> list[ProcessPeak]:
        """Peaks of all sampled processes, in the order of their start."""
        return [peak for peak in self._peaks.values() if peak.whole_bytes]

    @property
    def peaks_of_running(self) -> list[ProcessPeak]:
        """Peaks of the processes that ran at the last sample; this leaves out those that only compiled at the start."""
        return [self._peaks[process] for process in self._running]

    def _run(self) -> None:
        self._sample()
        while not self._stop.wait(INTERVAL_S):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        self._find_children()
        self._running = []
        for process, peak in list(self._peaks.items()):
            try:
                status = Path(f"/proc/{process}/status").read_text()
                command = Path(f"/proc/{process}/cmdline").read_bytes()
            except OSError:
                continue  # the process has ended
            if sizes := memory_sizes(status):
                self._running.append(process)
                peak.raise_to(*sizes)
                peak.name = process_name(command.decode(errors="replace").split("\0"))

    def _find_children(self) -> None:
        parents: dict[int, int] = {}
        for process in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
            if process not in self._peaks and process not in self._unrelated:
                try:
                    parents[process] = parent_id(Path(f"/proc/{process}/stat").read_text())
                except OSError:
                    continue
        while ours := [process for process, parent in parents.items() if parent in self._peaks]:
            for process in ours:
                self._peaks[process] = ProcessPeak("")
                del parents[process]
        self._unrelated |= parents.keys()


def memory_sizes(status: str) -> tuple[int, int] | None:
    """Return the peak of resident bytes and the present anonymous bytes from /proc/PID/status.

    Returns: None for a process that is ending.
    """
    fields = dict(line.split(":", 1) for line in status.splitlines())
    if "VmHWM" not in fields:
        return None
    return int(fields["VmHWM"].split()[0]) * 1024, int(fields["RssAnon"].split()[0]) * 1024


def parent_id(stat: str) -> int:
    """Return the parent from /proc/PID/stat: `PID (name) state parent ...`; the name may contain any character."""
    return int(stat.rpartition(")")[2].split()[1])


def process_name(command: Sequence[str]) -> str:
    """Return a short name of a process: the subcommand of `orca`, the end of a Python module's name, or the program."""
    if "-m" in command[:-1]:
        module, *rest = command[command.index("-m") + 1 :]
        if module == "orca.cli.main" and rest:
            return rest[0]
        # `orca.core.process.gc_freeze` starts the module that its first argument names.
        return (rest[0] if module == "orca.core.process.gc_freeze" and rest else module).rpartition(".")[2]
    return Path(command[0].split(" ")[0]).name


def memory_of_ranks(logs: Mapping[str, Iterable[bytes]], slots: int) -> RankMemory:
    """Return the memory that ranks report in the logs of their stages after loading; a restart counts once."""
    weights: dict[tuple[str, str], int] = {}
    slot: dict[tuple[str, str], int] = {}
    for name, rows in logs.items():
        for row in rows:
            if b'"KV slots offered"' in row:
                line = orjson.loads(row)
                place = name, line["service"]
                weights[place], slot[place] = line["weight_bytes"], line["kv_bytes"] // line["slots"]
    return RankMemory(weight_bytes=sum(weights.values()), kv_bytes_per_slot=sum(slot.values()), slots=slots)


def slots_in_use(outcomes: Sequence[RequestOutcome], block_tokens: int) -> int:
    """Return the most KV slots in use at any time, as seen by the client: whole blocks from first to last token.

    A cache needs memory for these slots. Offered slots that were never written take no memory.
    """
    changes: list[tuple[float, int]] = []
    for outcome in outcomes:
        request_slots = 0
        for count, time_s in enumerate(outcome.token_s):
            now = slots_needed(outcome.prompt_tokens + count, block_tokens)
            changes.append((time_s, now - request_slots))
            request_slots = now
        changes.append((outcome.end_s, -request_slots))
    most = current = 0
    for _, change in sorted(changes, key=lambda change: (change[0], -change[1])):
        current += change
        most = max(most, current)
    return most
