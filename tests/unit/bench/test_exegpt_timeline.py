"""Figure 4(a): the intervals of a cycle on every stage, simulated, from logs of stages, and broken by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from orca.bench.exegpt.timeline import CycleShape, boxes_of_logs, problems_of, simulated_boxes, whole_cycles
from orca.planner.pictures.timeline import Box

SHAPE = CycleShape(stages=2, decode_steps=2)


def cycle(start_s: float = 0.0) -> list[Box]:
    """Return a cycle of two stages in which every step takes a second."""
    boxes = []
    for place, (is_encode, microbatch) in enumerate(SHAPE.order()):
        for stage in range(2):
            begin = start_s + place + stage
            boxes.append(Box(stage=stage, start_s=begin, end_s=begin + 1, is_encode=is_encode, microbatch=microbatch))
    return boxes


def log_lines(cycles: int) -> list[Mapping[str, Any]]:
    """Return the lines of both stages. Micro-batch 0 has the handles 1 and 3, micro-batch 1 has 2; 4 joins it later."""
    lines: list[Mapping[str, Any]] = []
    members = [[1, 3], [2]]
    step = 0
    for number in range(cycles):
        for is_encode, microbatch in SHAPE.order():
            step += 1
            handles = members[microbatch]
            if is_encode and number:
                handles = [10 * number + microbatch]
                members[microbatch] = [members[microbatch][-1], *handles]
            for stage in range(2):
                start = (step + stage) * 1_000_000_000
                lines.append(
                    {
                        "stage": stage,
                        "step": step,
                        "handles": handles,
                        "new": ["a"] if is_encode else [],
                        "start_ns": start,
                        "end_ns": start + 1_000_000_000,
                    }
                )
    return lines


def test_the_simulated_cycle_is_that_of_figure_4() -> None:
    shape, boxes = simulated_boxes()
    assert shape == CycleShape(stages=4, decode_steps=3)
    assert problems_of(boxes, shape) == []
    # Two cycles of one encode and three decode iterations, of four micro-batches, on four stages.
    assert len(boxes) == 2 * 4 * 4 * 4
    first = sorted((box for box in boxes if box.stage == 0), key=lambda box: box.start_s)[:8]
    assert [(box.is_encode, box.microbatch) for box in first] == [
        *((True, number) for number in range(4)),
        *((False, number) for number in range(4)),
    ]


def test_logs_of_stages_give_the_same_intervals() -> None:
    boxes = boxes_of_logs(log_lines(cycles=4))
    shown = whole_cycles(boxes, SHAPE)
    assert problems_of(shown, SHAPE) == []
    assert len(shown) == 2 * 6 * 2
    assert {box.microbatch for box in shown} == {0, 1}


def test_a_log_without_whole_cycles_shows_nothing() -> None:
    assert whole_cycles(boxes_of_logs(log_lines(cycles=1)), SHAPE) == []


def test_a_good_cycle_has_no_problems() -> None:
    assert problems_of([*cycle(), *cycle(7.0)], SHAPE) == []


@pytest.mark.parametrize(
    ("number", "change", "problem"),
    [
        (2, {"start_s": 0.5}, "stage 0: a step begins before the one before it has ended"),
        (2, {"is_encode": False}, "stage 0: the order is not"),
        (4, {"microbatch": 1}, "stage 0: the order is not"),
        (1, {"start_s": 0.5}, "stage 1 begins a step before stage 0 has ended it"),
        (3, {"end_s": 9.0}, "micro-batch 2 decodes before its token is drawn"),
    ],
)
def test_a_broken_interval_is_found(number: int, change: dict[str, Any], problem: str) -> None:
    boxes = cycle()
    boxes[number] = replace(boxes[number], **change)
    assert any(found.startswith(problem) for found in problems_of(boxes, SHAPE))


def test_a_real_stage_may_record_its_end_late() -> None:
    boxes = cycle()
    boxes[0] = replace(boxes[0], end_s=1.0)
    boxes[1] = replace(boxes[1], start_s=0.9)
    assert problems_of(boxes, SHAPE) != []
    assert problems_of(boxes, replace(SHAPE, is_real=True)) == []
    boxes[1] = replace(boxes[1], start_s=-0.1)
    assert problems_of(boxes, replace(SHAPE, is_real=True)) != []


def test_a_missing_stage_is_found() -> None:
    assert problems_of([box for box in cycle() if box.stage == 0], SHAPE)[0].startswith("there are boxes of stages [0]")
