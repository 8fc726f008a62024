"""The workload that a pool has counted: from its answer, or from the file of `orca pool lengths --json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeGuard

from orca.core.domain.errors import SettingError
from orca.planner.workload.length_parts import LengthPart
from orca.planner.workload.lengths import LENGTH_MAX, Range
from orca.planner.workload.workload import Workload
from orca.pool.length_bins import bounds_of
from orca.pool.measured import ANSWERS_MIN
from orca.pool.records import LengthCounts

WEIGHT_MAX = 1e15
"""Largest weight of a cell in a file: sums of them stay finite."""


def counted_workload(
    counts: LengthCounts, *, half_life_s: float, source: str, length_max: int | None = None
) -> Workload:
    """Return the workload of a pool's counts.

    Args:
        half_life_s: seconds after which an answer has half its weight.
        length_max: the longest length that the model allows, since the last bin may reach beyond it.
    Raises: SettingError if nothing has been counted.
    """
    cells = [
        (_range(*bounds_of(prompt)), _range(*bounds_of(output)), weight)
        for (prompt, output), weight in sorted(counts.weighed(half_life_s).items())
    ]
    return _workload(cells, source, counts.answers, counts.cut_share, length_max)


def lengths_now(counts: LengthCounts, stated: Workload | None, *, half_life_s: float) -> Workload | None:
    """Return the lengths to plan for at a running service; None if there are none at all.

    Counted lengths of enough answers go before stated ones, which were an estimate. Stated ones go before those of too
    few answers.

    Args: half_life_s: seconds after which an answer has half its weight, more than 0.
    """
    if stated is not None and counts.answers < ANSWERS_MIN:
        return stated
    if not any(counts.weighed(half_life_s).values()):
        return stated
    return counted_workload(counts, half_life_s=half_life_s, source="the pool")


def cut_bins(workload: Workload, longest: int) -> Workload:
    """Return the workload with its bins cut where they reach beyond the longest request that the model allows.

    Prompt and output of a real answer fit together, while the upper ends of its two bins may not. A bin without any
    request that fits stays as it is.

    Args: longest: prompt and output together, in tokens.
    """
    return dataclasses.replace(workload, parts=tuple(_cut_part(part, longest) for part in workload.parts))


def _cut_part(part: LengthPart, longest: int) -> LengthPart:
    prompts, outputs = part.prompts, part.outputs
    if not isinstance(prompts, Range) or not isinstance(outputs, Range) or prompts.low + outputs.low > longest:
        return part
    outputs = Range(outputs.low, min(outputs.high, longest - prompts.low))
    return LengthPart(part.weight, Range(prompts.low, min(prompts.high, longest - outputs.high)), outputs)


def read_counted(content: Mapping[str, Any], source: str) -> Workload:
    """Read the object that `orca pool lengths --json` prints. Raises: SettingError that names the field."""
    answers, cut_share, cells = content.get("answers"), content.get("cut_share"), content.get("cells")
    if not _is_number(answers) or int(answers) != answers or answers < 1:
        raise SettingError(f"{source}: answers must be a whole number from 1 on, not {answers!r}")
    if not _is_number(cut_share) or not 0 <= cut_share <= 1:
        raise SettingError(f"{source}: cut_share must be a number from 0 to 1, not {cut_share!r}")
    if not isinstance(cells, list):
        raise SettingError(f"{source}: cells must be a list")
    read = [_read_cell(cell, f"{source}: cells[{index}]") for index, cell in enumerate(cells)]
    return _workload(read, source, int(answers), cut_share, None)


def _range(low: int, high: int) -> Range:
    # An answer that ended without a token ran one step, as one of a single token does.
    return Range(max(low, 1), max(high, 1))


def _workload(
    cells: list[tuple[Range, Range, float]], source: str, answers: int, cut_share: float, length_max: int | None
) -> Workload:
    if not any(weight > 0 for *_, weight in cells):
        raise SettingError(f"{source}: no answer has been counted")
    return Workload.of_cells(cells, source=source, answers=answers, cut_share=cut_share, length_max=length_max)


def _read_cell(cell: object, place: str) -> tuple[Range, Range, float]:
    if not isinstance(cell, dict):
        raise SettingError(f"{place} must be an object")
    prompts, outputs = (_read_range(cell.get(name), f"{place}.{name}") for name in ("prompt_tokens", "output_tokens"))
    weight = cell.get("weight")
    if not _is_number(weight) or not 0 <= weight <= WEIGHT_MAX:
        raise SettingError(f"{place}.weight must be a number from 0 to 1e15, not {weight!r}")
    return prompts, outputs, weight


def _read_range(value: object, place: str) -> Range:
    if isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value):
        low, high = value
        if 0 <= low <= high <= LENGTH_MAX:
            return _range(low, high)
    raise SettingError(f"{place} must be the smallest and the largest length, not {value!r}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
