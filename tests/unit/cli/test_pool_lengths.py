"""`orca pool lengths`: what it prints about counts."""

import json

import pytest

from orca.cli.pool_lengths import lengths_json, lengths_text
from orca.pool.length_bins import bin_of
from orca.pool.records import LengthCounts, PeriodLengths


def counts(*answers: tuple[int, int, int], cut: int = 0, older: tuple[tuple[int, int, int], ...] = ()) -> LengthCounts:
    """Return counts of (prompt tokens, output tokens, answers), of now and of one hour ago."""
    return LengthCounts(
        periods=tuple(
            PeriodLengths(
                age_ms=age_ms,
                cells={(bin_of(prompt), bin_of(output)): number for prompt, output, number in found},
                cut=cut if age_ms == 0 else 0,
            )
            for age_ms, found in ((0, answers), (3_600_000, older))
            if found
        )
    )


def test_a_person_reads_answers_cut_share_means_and_percentiles() -> None:
    lines = lengths_text("r1", counts((5, 3, 49), (5, 7, 50), (9, 12, 1), cut=8), 1800).splitlines()
    assert lines[:2] == ["revision r1: 100 answers in the last 4 hours, half-life 1800 s", "cut by max_tokens: 8.0%"]
    assert [line.split() for line in lines[2:]] == [
        ["tokens", "mean", "p50", "p90", "p99"],
        ["prompt", "5.0", "5", "5", "5"],
        ["output", "5.1", "7", "7", "7"],
    ]


def test_equal_lengths_are_every_figure() -> None:
    found = json.loads(lengths_json("r1", counts((8, 15, 1000)), 60))
    assert found["prompt_tokens"] == {"mean": 8.0, "p50": 8, "p90": 8, "p99": 8}
    assert found["output_tokens"] == {"mean": 15.0, "p50": 15, "p90": 15, "p99": 15}


def test_a_percentile_is_no_less_than_the_lengths_in_its_bin() -> None:
    found = json.loads(lengths_json("r1", counts((1000, 100, 1)), 60))
    assert (found["prompt_tokens"]["p50"], found["output_tokens"]["p50"]) == (1023, 103)
    assert found["cells"] == [{"prompt_tokens": [960, 1023], "output_tokens": [96, 103], "weight": 1.0}]


@pytest.mark.parametrize(("half_life_s", "median"), [(10**9, 9), (1800, 9), (600, 2)])
def test_older_answers_count_less(half_life_s: int, median: int) -> None:
    """One answer of now, and 5 of an hour ago: with a half-life of 10 minutes they weigh 5 / 64."""
    found = json.loads(lengths_json("r1", counts((4, 2, 1), older=((4, 9, 5),)), half_life_s))
    assert found["output_tokens"]["p50"] == median
    assert (found["answers"], found["half_life_s"], found["cut_share"]) == (6, half_life_s, 0.0)
