"""Iteration-level scheduling on real stages, read off the iteration log and not off the clock."""

from pathlib import Path

import pytest

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Part
from orca.scheduler.observer import IterationHistory, IterationRecord
from support.system.running_group import RunningGroup, Work

pytestmark = pytest.mark.timeout(300)  # longer than a group is waited for

FOREVER = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("prefetch", [0, 1])
async def test_a_late_request_joins_and_an_early_one_leaves_while_others_run(tmp_path: Path, prefetch: int) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", max_position_embeddings=512)
    shared = await shared_step(folder, (), prefetch)
    assert {row.phase for row in shared.rows} == {"initiation", "increment"}, "both phases in one step"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("prefetch", [0, 1])
async def test_the_source_of_a_late_request_shares_a_step_with_the_targets_of_others(
    tmp_path: Path, prefetch: int
) -> None:
    folder = tiny_checkpoint("bart", tmp_path / "model", max_position_embeddings=512)
    shared = await shared_step(folder, (2, 5), prefetch)
    joined = shared.rows[0].request_id
    assert [(row.part, row.phase, row.count, row.request_id == joined) for row in shared.rows] == [
        (Part.SOURCE, "initiation", 4, True),
        (Part.TARGET, "increment", 1, False),
        (Part.TARGET, "initiation", 2, True),
    ]


async def shared_step(folder: Path, decoder_prefix: tuple[int, ...], prefetch: int) -> IterationRecord:
    """Serve a long request, an early one and a late one. Returns: the step with which the late one joins the long."""
    log = IterationHistory()
    works = [
        Work(prompt=(5, 6, 7), max_new_tokens=400, sampling=FOREVER, decoder_prefix=decoder_prefix),
        Work(prompt=(8, 9), max_new_tokens=5, sampling=FOREVER, decoder_prefix=decoder_prefix),
        Work(prompt=(10, 11, 12, 13), max_new_tokens=5, sampling=FOREVER, after=1, decoder_prefix=decoder_prefix),
    ]
    with RunningGroup(folder, delay_ms=2) as group:
        await group.serve(works, log=log, max_batch_size=3, prefetch=prefetch)
    steps = {name: [record.step for record in log.records if name in members(record)] for name in names(log)}
    long, early, late = steps.values()
    assert long[0] == early[0], "the first two start in one batch"
    assert long[0] < early[-1] < long[-1], "the early one leaves while the long one runs"
    assert early[-1] < late[0] < late[-1] < long[-1], "the late one joins and leaves while the long one runs"
    running, _, joined = steps
    return next(record for record in log.records if members(record) >= {joined, running})


def members(record: IterationRecord) -> set[str]:
    return {row.request_id for row in record.rows}


def names(log: IterationHistory) -> list[str]:
    return list(dict.fromkeys(row.request_id for record in log.records for row in record.rows))
