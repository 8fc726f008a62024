"""Measures how long clients waited after a fault, split into phases as far as they are visible from outside. Pure.

    fault ── detect ──▶ a part reports it ── re-form ──▶ "epoch formed" ── recompute ──▶ next token
                        (a death, "epoch over", "seat taken", "pool away")

The quoted words are messages of the parts, from their logs and from `orca up`. If the group stays formed, "pool back"
ends the re-forming. Sometimes no part reports anything between the fault and the next token of an affected stream: a
gateway died, or a freeze was too short to be noticed. Then there is only a total. It lasts until the end of the longest
gap in the affected streams, because tokens that were already on their way still arrive directly after a fault.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from checker.history.records import Event, Fault, GroupNews, Record

TROUBLE = frozenset({"death", "over", "seat", "away"})
"""Reports after which the group does not serve as before."""

NOTICED_WITHIN_S = 60.0
"""A report belongs to a fault if it came within this time after it, and before the next fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The phases of the repair after one fault, in seconds; None: not visible."""

    fault: int
    kind: str
    targets: tuple[str, ...]
    affected: int  # open streams
    total_s: float | None  # to the first token of an affected stream after the repair
    worst_s: float | None  # to the first token of the affected stream that waited longest, with its time in the queue
    detect_s: float | None = None
    reform_s: float | None = None
    recompute_s: float | None = None


def measure_repairs(records: Sequence[Record]) -> list[Repair]:
    """Return one repair per fault, in order."""
    faults = [record for record in records if isinstance(record, Fault)]
    news = sorted((record for record in records if isinstance(record, GroupNews)), key=lambda record: record.at)
    tokens: dict[str, list[float]] = {}
    for record in records:
        if isinstance(record, Event) and _is_token(record):
            tokens.setdefault(record.call, []).append(record.at)
    untils = [*(fault.at for fault in faults[1:]), float("inf")]
    return [_measure(fault, until, news, tokens) for fault, until in zip(faults, untils, strict=False)]


def repair_table(repairs: Sequence[Repair]) -> str:
    """Return a table of seconds by fault and target: the median, and the 99th percentile (the maximum below 100)."""
    groups: dict[str, list[Repair]] = {}
    for repair in repairs:
        targets = "+".join(sorted({name.partition("-")[0] for name in repair.targets}))
        groups.setdefault(f"{repair.kind} {targets}", []).append(repair)
    head = f"  {'fault':<28}{'n':>4}{'total':>15}{'detect':>15}{'re-form':>15}{'recompute':>15}{'worst':>8}"
    lines = ["repair, seconds: median (p99)", head]
    for name, group in sorted(groups.items()):
        parts = ("total_s", "detect_s", "reform_s", "recompute_s")
        cells = "".join(f"{_spread([getattr(repair, part) for repair in group]):>15}" for part in parts)
        worst = max((repair.worst_s for repair in group if repair.worst_s is not None), default=None)
        lines.append(f"  {name[:28]:<28}{len(group):>4}{cells}{'-' if worst is None else f'{worst:.1f}':>8}")
    return "\n".join(lines)


def _measure(fault: Fault, until: float, news: Sequence[GroupNews], tokens: dict[str, list[float]]) -> Repair:
    limit = min(until, fault.at + fault.seconds + NOTICED_WITHIN_S)
    following = [item for item in news if fault.at <= item.at < limit]
    noticed = next((item.at for item in following if item.what in TROUBLE), None)
    formed = None if noticed is None else _first(following, "formed", noticed) or _first(following, "back", noticed)
    token_times = sorted(at for call in fault.in_flight for at in tokens.get(call, []) if fault.at < at < until)
    since = _silence_began(fault.at, token_times) if formed is None else formed
    nexts = [at for call in fault.in_flight if (at := _next(tokens.get(call, []), since)) is not None and at < until]
    return Repair(
        fault=fault.number,
        kind=fault.kind,
        targets=fault.targets,
        affected=len(fault.in_flight),
        total_s=min(nexts) - fault.at if nexts else None,
        worst_s=max(nexts) - fault.at if nexts else None,
        detect_s=None if noticed is None else noticed - fault.at,
        reform_s=None if formed is None or noticed is None else formed - noticed,
        recompute_s=None if formed is None or not nexts else min(nexts) - formed,
    )


def _first(news: Sequence[GroupNews], what: str, since: float) -> float | None:
    return next((item.at for item in news if item.what == what and item.at >= since), None)


def _silence_began(since: float, times: Sequence[float]) -> float:
    """Return the start of the longest gap without a token."""
    starts = [since, *times]
    gaps = [(end - start, start) for start, end in pairwise(starts)]
    return max(gaps, default=(0.0, since))[1]


def _next(times: Sequence[float], after: float) -> float | None:
    place = bisect_right(times, after)
    return times[place] if place < len(times) else None


def _is_token(event: Event) -> bool:
    _, dot, place = (event.id or "").partition(".")
    return bool(dot) and place.isdigit()


def _spread(values: Sequence[float | None]) -> str:
    seen = [value for value in values if value is not None]
    if not seen:
        return "-"
    return f"{statistics.median(seen):.2f} ({sorted(seen)[math.ceil(len(seen) * 0.99) - 1]:.2f})"
