"""Pipelining with real processes: three stages of 30 ms each, prefetch 0 (ORCA, section 4.2 and Figure 8a)."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from engine_builders import Stages, engine_for, generate, new_request

from orca.core.step import Epoch

pytestmark = pytest.mark.alone

STAGES = 3
DELAY_MS = 30
STEPS = 75
WARM_UP = 9
IDLE_MAX = 0.10
# Other work on the machine only adds idle time, and the pipeline has no slack to make up for it. So the share is read
# over the quietest rounds in a row, half a second of them; stages that do not overlap idle two thirds of any round.
ROUNDS = 5
ATTEMPTS = 10

Log = list[dict[str, Any]]


@pytest.fixture(scope="module")
def logs(start_stages: Callable[..., Stages]) -> list[Log]:
    """Iteration logs of three stages that ran six requests in batches of two: AB, CD, EF, AB, ..."""
    group = start_stages(STAGES, 1, "--delay-ms", str(DELAY_MS))
    runs = []
    for _ in range(ATTEMPTS):
        epoch = group.next_epoch()
        asyncio.run(_run(group, epoch))
        runs.append([group.log(stage, epoch)[:STEPS] for stage in range(STAGES)])
        if _idle_share(runs[-1]) < IDLE_MAX:
            break
    return min(runs, key=_idle_share)


async def _run(group: Stages, epoch: Epoch) -> None:
    engine = engine_for(group.addresses)
    await engine.form(epoch)
    count = STEPS // STAGES
    requests = [new_request(handle, (handle, 3), count) for handle in range(1, 7)]
    await generate(engine, epoch, requests, [count] * 6, stages=STAGES, batch=2, arrive_at_once=True)
    await engine.close()


def test_batches_take_their_turns_as_in_figure_8a(logs: list[Log]) -> None:
    for log in logs:
        assert [line["step"] for line in log] == list(range(1, STEPS + 1))
        assert [line["handles"] for line in log] == [[1, 2], [3, 4], [5, 6]] * (STEPS // STAGES)


def test_a_batch_is_on_one_stage_after_the_other_and_a_stage_on_one_batch_at_a_time(logs: list[Log]) -> None:
    for step in range(STEPS):
        for before, after in pairwise(logs):
            assert before[step]["start_ns"] + DELAY_MS * 1_000_000 <= after[step]["start_ns"]
    for log in logs:
        assert all(first["end_ns"] <= second["start_ns"] for first, second in pairwise(log))


def test_all_stages_compute_at_the_same_time_each_another_batch(logs: list[Log]) -> None:
    steps = range(WARM_UP, STEPS - STAGES)
    together_ns = []
    for step in steps:
        lines = [log[step + STAGES - 1 - stage] for stage, log in enumerate(logs)]
        assert len({tuple(line["handles"]) for line in lines}) == STAGES
        together_ns.append(min(line["end_ns"] for line in lines) - max(line["start_ns"] for line in lines))
    is_half = [overlap_ns > DELAY_MS * 1_000_000 / 2 for overlap_ns in together_ns]
    assert sum(is_half) > 0.9 * len(steps), "for half of each step; the machine may disturb one in ten"


def test_every_stage_is_idle_under_a_tenth_of_the_time_after_warm_up(logs: list[Log]) -> None:
    assert _idle_share(logs) < IDLE_MAX


def test_the_control_message_reaches_the_last_stage_before_the_first_ends_its_computation(
    logs: list[Log],
) -> None:
    for first, last in zip(logs[0], logs[-1], strict=True):
        assert last["received_ns"] < first["end_ns"]


def _idle_share(logs: list[Log]) -> float:
    """Of the stage that is idle most, over the quietest rounds between warm-up and the last steps."""
    length = ROUNDS * STAGES
    return min(
        max(_idle_share_of_stage(log[first : first + length + 1]) for log in logs)
        for first in range(WARM_UP, STEPS - STAGES - length)
    )


def _idle_share_of_stage(log: Log) -> float:
    """Between the end of the first step and that of the last one."""
    busy_ns = sum(line["end_ns"] - line["start_ns"] for line in log[1:])
    return float(1 - busy_ns / (log[-1]["end_ns"] - log[0]["end_ns"]))
