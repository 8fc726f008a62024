"""Workloads that a pool has counted, and the file of `orca pool lengths --json`."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca.cli.pool_lengths import lengths_json
from orca.core.domain.errors import SettingError
from orca.planner.workload.counted import counted_workload, cut_bins
from orca.planner.workload.lengths_file import read_workload
from orca.pool.length_bins import bin_of
from orca.pool.records import LengthCounts, PeriodLengths

NEW = PeriodLengths(age_ms=0, cells={(bin_of(8), bin_of(4)): 30, (bin_of(100), bin_of(40)): 10}, cut=4)
OLD = PeriodLengths(age_ms=1_800_000, cells={(bin_of(8), bin_of(4)): 20}, cut=0)
COUNTS = LengthCounts(periods=(NEW, OLD))


def test_counts_become_a_workload() -> None:
    workload = counted_workload(COUNTS, half_life_s=1800, source="the pool")
    assert workload.answers == 60
    assert workload.cut_share == pytest.approx(4 / 60)
    # 30 new ones and 20 old ones of half the weight have 4 tokens; 10 have 40 to 43.
    assert workload.outputs.mean == pytest.approx((40 * 4 + 10 * 41.5) / 50)
    assert workload.outputs.percentile(80) == 4
    assert workload.outputs.percentile(99) == 43
    assert workload.correlation > 0.9


def test_the_printed_file_is_the_same_workload(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(lengths_json("r", COUNTS, 1800))
    read, counted = read_workload(file), counted_workload(COUNTS, half_life_s=1800, source="the pool")
    assert read.outputs.pmf() == counted.outputs.pmf()
    assert read.pairs == counted.pairs
    assert (read.answers, read.cut_share) == (60, pytest.approx(4 / 60))


def test_an_answer_without_a_token_counts_as_one_of_a_token() -> None:
    counts = LengthCounts(periods=(PeriodLengths(age_ms=0, cells={(bin_of(3), 0): 5}, cut=0),))
    assert counted_workload(counts, half_life_s=1800, source="the pool").outputs.high == 1


def test_the_last_bin_ends_with_the_model() -> None:
    counts = LengthCounts(periods=(PeriodLengths(age_ms=0, cells={(bin_of(100), bin_of(100)): 5}, cut=0),))
    workload = counted_workload(counts, half_life_s=1800, source="the pool", length_max=100)
    assert (workload.prompts.high, workload.outputs.high) == (100, 100)


def test_a_pool_without_answers_is_refused() -> None:
    with pytest.raises(SettingError, match="the pool: no answer has been counted"):
        counted_workload(LengthCounts(periods=()), half_life_s=1800, source="the pool")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answers": 0}, "answers must be a whole number from 1 on, not 0"),
        ({"answers": "60"}, "answers must be a whole number"),
        ({"cut_share": 2}, "cut_share must be a number from 0 to 1, not 2"),
        ({"cells": {}}, "cells must be a list"),
        ({"cells": []}, "no answer has been counted"),
        ({"cells": [3]}, r"cells\[0\] must be an object"),
        (
            {"cells": [{"prompt_tokens": [4, 3], "output_tokens": [1, 1], "weight": 1}]},
            r"cells\[0\].prompt_tokens",
        ),
        ({"cells": [{"prompt_tokens": [3, 4], "output_tokens": [1], "weight": 1}]}, r"cells\[0\].output_tokens must"),
        ({"cells": [{"prompt_tokens": [3, 4], "output_tokens": [1, 1], "weight": -1}]}, r"cells\[0\].weight must"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps(json.loads(lengths_json("r", COUNTS, 1800)) | change))
    with pytest.raises(SettingError, match=said):
        read_workload(file)


def test_ranges_are_not_scaled(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(lengths_json("r", COUNTS, 1800))
    with pytest.raises(SettingError, match="cannot be scaled"):
        read_workload(file, scale=0.5)


@pytest.mark.parametrize(("prompt", "output"), [(30, 226), (226, 30), (100, 156), (1, 255), (255, 1), (128, 128)])
def test_answers_that_fill_the_context_of_the_model_fit_into_it(prompt: int, output: int) -> None:
    counts = LengthCounts(periods=(PeriodLengths(age_ms=0, cells={(bin_of(prompt), bin_of(output)): 300}, cut=300),))
    counted = counted_workload(counts, half_life_s=1800, source="the pool", length_max=256)
    cut = cut_bins(counted, 256)
    assert cut.longest <= 256
    cut.check_fits(256)
    assert (cut.answers, cut.cut_share) == (300, 1)
    assert cut.prompts.low <= prompt
    assert cut.outputs.low <= output


def test_a_bin_that_never_fits_is_still_refused() -> None:
    counts = LengthCounts(periods=(PeriodLengths(age_ms=0, cells={(bin_of(200), bin_of(200)): 300}, cut=0),))
    counted = counted_workload(counts, half_life_s=1800, source="the pool")
    with pytest.raises(SettingError, match="the model allows 256"):
        cut_bins(counted, 256).check_fits(256)
