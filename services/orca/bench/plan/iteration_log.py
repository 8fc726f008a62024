"""The times of answers in the iteration log of a scheduler (`--iteration-log`)."""

from collections import Counter
from pathlib import Path

import orjson

from orca.planner.simulate.steady_state import TimedAnswer


def count_steps(log: Path) -> int:
    """Return the number of steps with requests."""
    return sum(bool(orjson.loads(line)["rows"]) for line in log.read_bytes().splitlines())


def read_answers(log: Path, *, skip: int = 0) -> list[TimedAnswer]:
    """Return the times of the answers of a run, in the order of their first steps.

    An answer's tokens are counted by its steps: one of the last step with its prompt, and one of each step after that.

    Args: skip: leave out so many of the first answers, those of a warm-up.
    """
    first_s: dict[str, float] = {}
    first_token_s: dict[str, float] = {}
    end_s: dict[str, float] = {}
    tokens: Counter[str] = Counter()
    for line in log.read_bytes().splitlines():
        step = orjson.loads(line)
        submitted_s, returned_s = step["submitted_ns"] / 1e9, step["returned_ns"] / 1e9
        for request, phase, _, _, *part in step["rows"]:
            first_s.setdefault(request, submitted_s)
            if part == ["source"]:
                continue
            end_s[request] = returned_s
            if phase == "initiation":
                first_token_s[request] = returned_s
            else:
                tokens[request] += 1
    requests = list(first_s)[skip:]
    return [TimedAnswer(first_s[each], first_token_s[each], end_s[each], tokens[each] + 1) for each in requests]
