"""The results of stale work: turns the recorder's lines (checker.points.recorder) into one record of a history.

commit  It is stale if its call began after a later claim of its request had been answered. It must be refused.
step    It is stale if its stage joined a later epoch before the step arrived. It must be refused, and none runs twice.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checker.history.records import Offers

HARMLESS = frozenset({"not yours", "ended", "already there"})
"""Answers to a stale commit that mean that nothing was written."""


def read_offers(folder: Path, *, at: float) -> Offers | None:
    """Return the offers of a run; None if nothing was recorded."""
    paths = sorted((folder / "records").glob("*.jsonl"))
    lines = [{"process": path.stem, **line} for path in paths for line in _lines(path)]
    return judge_offers(lines, at=at) if lines else None


def judge_offers(lines: Iterable[dict[str, Any]], *, at: float) -> Offers:
    """Return counts of everything that was offered, and a sentence for each stale commit or step that was taken."""
    by_kind: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_kind[line["what"]].append(line)
    counts: Counter[str] = Counter()
    harmful = [*_commits(by_kind, counts), *_steps(by_kind, counts)]
    return Offers(at=at, counts=dict(counts), harmful=tuple(harmful))


def _commits(by_kind: dict[str, list[dict[str, Any]]], counts: Counter[str]) -> Iterable[str]:
    claims: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for claim in by_kind["claimed"]:
        claims[claim["request"]].append((claim["claim"], claim["at"]))
    for commit in by_kind["committed"]:
        counts[f"commits {commit['answer']}"] += 1
        if any(number > commit["claim"] and at < commit["at"] for number, at in claims[commit["request"]]):
            counts["stale commits offered"] += 1
            if commit["answer"] not in HARMLESS:
                counts["stale commits applied"] += 1
                yield f"commit of {commit['request']} at {commit['index']} by claim {commit['claim']}, which was over"


def _steps(by_kind: dict[str, list[dict[str, Any]]], counts: Counter[str]) -> Iterable[str]:
    joins: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for join in by_kind["joined"]:
        joins[join["process"]].append((join["epoch"], join["at"]))
    ran: set[tuple[str, int, str, int]] = set()
    for step in by_kind["step"]:
        process, epoch = step["process"], step["epoch"]
        counts["steps run" if step["ran"] else "steps refused"] += 1
        is_stale = any(number > epoch and at < step["at"] for number, at in joins[process])
        counts["stale steps offered"] += is_stale
        key = (process, epoch, step["holder"], step["step"])
        if step["ran"] and is_stale:
            counts["stale steps run"] += 1
            yield f"step {step['step']} of epoch {epoch} ran on {process}, which had joined a later one"
        elif step["ran"] and key in ran:
            counts["steps run twice"] += 1
            yield f"step {step['step']} of epoch {epoch} ran twice on {process}"
        if step["ran"]:
            ran.add(key)


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    """Yield whole lines; a kill may have cut the last one."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
