"""`orca bench grammars --hostile-s N`: measures what hostile grammars cost other requests, and the memory they leave.

A whole Orca serves the small model. Clients stream, in turn undisturbed and while one hostile grammar follows the
other: other work on the machine then slows both alike. After each turn, the memory of gateway and ranks is read.

Every answer is checked before there is a figure. The text of the clients is always the same, and a hostile grammar is
answered with 400, with an error of its own, or with text.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from orca.bench.client import EventStream, LoadTarget, post_bytes
from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.host.parts import resident_bytes
from orca.bench.parts.hostile_grammars import hostile, words_of
from orca.bench.peers.memory import parent_id, process_name
from orca.bench.system import running_system
from orca.core.domain.errors import OrcaError
from orca.planner.simulate.outcomes import percentile

ROLES = frozenset({"gateway", "rank"})
"""The processes whose memory is read, by their short names."""
WARM_SHARE = 0.25
"""Part of the run in which caches fill: the growth of memory is that of the rest."""
_BUSY = 503


class HostileFailed(OrcaError):
    """An answer was not the right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileLoad:
    """The clients, and the grammars beside them."""

    seconds: float  # of the whole run
    phase_s: float = 15.0  # of one turn; undisturbed and disturbed ones alternate
    clients: int = 8
    new_tokens: int = 200  # of one call; a client makes one call after the other
    interval_s: float = 1.0  # from one hostile grammar to the next
    seed: int = 1


@dataclass(slots=True, kw_only=True)
class HostileFigures:
    """Figures of one run. Gaps are those between two tokens of one client."""

    load: HostileLoad
    undisturbed_p99_s: list[float] = field(default_factory=list)  # of each turn
    disturbed_p99_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)  # time of each answer with 400
    accepted: int = 0
    memory_mib: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Seconds since the start, and MiB, for each role."""

    @property
    def ratios(self) -> list[float]:
        """The 99th percentile beside hostile grammars as a share of the one without, by turns."""
        return [one / other for one, other in zip(self.disturbed_p99_s, self.undisturbed_p99_s, strict=True)]

    def growth_mib_per_h(self, role: str) -> float:
        """Return the slope of the memory of a role after the first quarter: medians of two halves, compared."""
        samples = [each for each in self.memory_mib[role] if each[0] >= WARM_SHARE * self.load.seconds]
        half = len(samples) // 2
        if not half:
            return 0.0
        (early_s, early), (late_s, late) = (
            (median(at for at, _ in some), median(mib for _, mib in some)) for some in (samples[:half], samples[half:])
        )
        return 3600 * (late - early) / (late_s - early_s)


async def measure(
    model: str, load: HostileLoad, folder: Path, options: Sequence[str], vocab_size: int
) -> HostileFigures:
    """Run all turns. Args: options: for `orca up`. Raises: HostileFailed, ServerFailed."""
    found, started = HostileFigures(load=load), list[int]()
    grammars = iter(hostile(round(load.seconds / load.interval_s) + 1, load.seed))
    async with running_system(model, options, folder, vocab_size=vocab_size, on_start=started.append) as target:
        expected = await _texts(target, load)
        start_s = perf_counter()
        while perf_counter() - start_s < load.seconds:
            for sends, p99_s in ((False, found.undisturbed_p99_s), (True, found.disturbed_p99_s)):
                gaps_s = await _turn(target, load, expected, grammars if sends else None, found)
                p99_s.append(percentile(sorted(gaps_s), 0.99))
            for role, mib in memory_of(started[0]).items():
                found.memory_mib[role].append((perf_counter() - start_s, mib))
    return found


async def _turn(
    target: LoadTarget,
    load: HostileLoad,
    expected: Sequence[Sequence[int]],
    grammars: Iterator[Mapping[str, Any]] | None,
    found: HostileFigures,
) -> list[float]:
    """Stream to all clients for one turn. The first error ends them all.

    Args: grammars: sent beside the streams; None: the clients are alone.
    Returns: gaps between tokens. Raises: HostileFailed.
    """
    until_s = perf_counter() + load.phase_s
    try:
        async with asyncio.TaskGroup() as group:
            streams = [
                group.create_task(_stream(target, _call(target, load, i), expected[i], until_s))
                for i in range(load.clients)
            ]
            while grammars is not None and perf_counter() < until_s:
                await _send_hostile(target, next(grammars, {"regex": "a*"}), found)
                await asyncio.sleep(load.interval_s)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [gap for stream in streams for gap in stream.result()]


async def _texts(target: LoadTarget, load: HostileLoad) -> list[Sequence[int]]:
    """Return the tokens that each client gets, before anything disturbs it."""
    streams = await asyncio.gather(*(_answer(target, _call(target, load, i)) for i in range(load.clients)))
    return [stream.token_ids for stream in streams]


def _call(target: LoadTarget, load: HostileLoad, client: int) -> bytes:
    prompt = [1 + client, 2, 3, 4, 5, 6, 7, 8]
    body = {"model": target.model, "prompt": prompt, "max_tokens": load.new_tokens, "temperature": 0}
    return post_bytes(target, {**body, "ignore_eos": True, "stream": True, "return_token_ids": True})


async def _stream(target: LoadTarget, call: bytes, expected: Sequence[int], until_s: float) -> list[float]:
    """Stream one answer after the other until a time. Returns: gaps between tokens. Raises: HostileFailed."""
    gaps_s: list[float] = []
    while perf_counter() < until_s:
        stream = await _answer(target, call)
        if stream.error is not None or stream.token_ids != expected:
            raise HostileFailed(f"a client did not get its own tokens: {stream.error}")
        gaps_s += [after - before for before, after in pairwise(stream.token_s)]
    return gaps_s


async def _send_hostile(target: LoadTarget, structured: Mapping[str, Any], found: HostileFigures) -> None:
    """Send one. Raises: HostileFailed for a status that is no client's fault."""
    body = {"model": target.model, "prompt": [1, 2], "max_tokens": 8, "temperature": 1, "stream": True}
    start_s = perf_counter()
    stream = await _answer(target, post_bytes(target, {**body, "structured_outputs": structured}))
    if stream.status == 400:
        found.refusals_s.append(perf_counter() - start_s)
    elif stream.status == 200:
        found.accepted += 1
    else:
        raise HostileFailed(f"a grammar was answered with {stream.status}: {words_of(dict(structured))}")


async def _answer(target: LoadTarget, call: bytes) -> EventStream:
    """Return the stream of a call at its end. A gateway that is late refuses calls: they are sent again."""
    while True:
        stream = EventStream(call)
        await asyncio.get_running_loop().create_connection(lambda one=stream: one, target.host, target.port)  # type: ignore[misc]
        try:
            await stream.ended
        finally:
            stream.close()
        if stream.status != _BUSY:
            return stream
        await asyncio.sleep(0.1)


def memory_of(ancestor: int) -> dict[str, float]:
    """Return the resident memory of the processes of each role below a process, in MiB."""
    found: dict[str, float] = {}
    for process in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        with suppress(OSError):  # it has ended
            name = process_name(Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0"))
            if name in ROLES and _is_below(process, ancestor):
                found[name] = found.get(name, 0.0) + resident_bytes(process) / (1 << 20)
    return found


def _is_below(process: int, ancestor: int) -> bool:
    """Return whether a process descends from another one. Raises: OSError if one in between has ended."""
    while process > 1 and process != ancestor:
        process = parent_id(Path(f"/proc/{process}/stat").read_text())
    return process == ancestor


def lines(found: HostileFigures) -> list[str]:
    """Return the figures for a terminal."""
    slowest_s, ratios = max(found.refusals_s, default=0.0), found.ratios
    alone_ms, beside_ms = 1e3 * median(found.undisturbed_p99_s), 1e3 * median(found.disturbed_p99_s)
    memory = [
        f"{role:8}{samples[0][1]:.0f} MiB after the first turn, {samples[-1][1]:.0f} MiB after the last, "
        f"{found.growth_mib_per_h(role):+.1f} MiB an hour after the first quarter"
        for role, samples in found.memory_mib.items()
    ]
    return [
        f"grammars {len(found.refusals_s)} got 400, the slowest after {slowest_s:.2f} s; {found.accepted} ran",
        f"p99 gap {alone_ms:.1f} ms alone, {beside_ms:.1f} ms beside them",
        f"ratio   {median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f}) in {len(ratios)} turns",
        *memory,
    ]


def to_json(found: HostileFigures) -> dict[str, Any]:
    """Return the same figures as plain data."""
    return {
        "undisturbed_p99_s": found.undisturbed_p99_s,
        "disturbed_p99_s": found.disturbed_p99_s,
        "refused": len(found.refusals_s),
        "slowest_refusal_s": max(found.refusals_s, default=0.0),
        "accepted": found.accepted,
        "memory_mib": dict(found.memory_mib),
    }


def figures(found: HostileFigures, settings: Mapping[str, Setting | None]) -> list[Measured]:
    """Return the same figures as records."""
    sent = len(found.refusals_s) + found.accepted
    every = {**settings, "clients": found.load.clients, "interval_s": found.load.interval_s}
    return [
        measured("Gaps between tokens beside hostile grammars", [100 * each for each in found.ratios], "%", every),
        measured(
            "Slowest refusal of a hostile grammar",
            max(found.refusals_s, default=0.0),
            "ms",
            every,
            scale=1e3,
            runs=len(found.refusals_s),
        ),
        *(
            measured("Growth of memory", found.growth_mib_per_h(role), "MiB/h", {**every, "process": role}, runs=sent)
            for role in found.memory_mib
        ),
    ]
