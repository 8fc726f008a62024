"""A comparison that is never run, and the check of a judge, for tests of both kinds of models."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orca.bench.peers.comparison import PeerComparison
from orca.bench.peers.workload import PeerAnswer
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import TraceSpec, generate


def some_comparison(rate: float | None = None, *, requests: int = 4, **choices: Any) -> PeerComparison:
    """Return a comparison of files that do not exist. Args: choices: fields of it."""
    defaults: dict[str, Any] = {
        "model": Path("some-model"),
        "vocab_size": 300,
        "trace": generate(TraceSpec(requests=requests, prompt_tokens=Range(1, 9), new_tokens=Range(2, 2), rate=rate)),
        "batch_size": 2,
        "threads": 1,
        "rounds": 1,
        "up_options": [],
        "folder": Path("nowhere"),
    }
    return PeerComparison(**(defaults | choices))


def check_judge(
    answer: PeerAnswer, judge: Callable[[Path], Path], new_tokens: Sequence[int], *, vocab: int, folder: Path
) -> None:
    """Check that a reference finds its own tokens right, a changed one wrong, and a missing one missing.

    Args:
        answer: of the reference, to at least five requests; it is changed.
        judge: judges the answer in a file, and returns the file of its judgement.
    """
    given = folder / "given.json"
    answer.save(given)
    right = json.loads(judge(given).read_text())
    assert right == {"tokens": sum(new_tokens), "excused": 0, "wrong": 0, "wrong_counts": 0}

    answer.tokens[2][-1] = (answer.tokens[2][-1] + 1) % vocab
    del answer.tokens[4][-1]
    answer.save(given)
    judged = json.loads(judge(given).read_text())
    assert (judged["wrong"], judged["wrong_counts"]) == (1, 1)
