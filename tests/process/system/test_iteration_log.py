"""Iteration-level scheduling on real stages, read off the iteration log and not off the clock."""

from pathlib import Path

import pytest

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.request import SamplingParams
from orca.scheduler.observer import IterationHistory
from support.system.running_group import RunningGroup, Work

pytestmark = pytest.mark.timeout(300)  # longer than a group is waited for

FOREVER = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_a_late_request_joins_and_an_early_one_leaves_while_others_run(tmp_path: Path, prefetch: int) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", max_position_embeddings=512)
    log = IterationHistory()
    works = [
        Work(prompt=(5, 6, 7), max_new_tokens=400, sampling=FOREVER),
        Work(prompt=(8, 9), max_new_tokens=5, sampling=FOREVER),
        Work(prompt=(10, 11, 12, 13), max_new_tokens=5, sampling=FOREVER, after=1),
    ]
    with RunningGroup(folder, delay_ms=2) as group:
        await group.serve(works, log=log, max_batch_size=3, prefetch=prefetch)
    steps = {name: [record.step for record in log.records if name in members(record)] for name in names(log)}
    long, early, late = steps.values()
    assert long[0] == early[0], "the first two start in one batch"
    assert long[0] < early[-1] < long[-1], "the early one leaves while the long one runs"
    assert early[-1] < late[0] < late[-1] < long[-1], "the late one joins and leaves while the long one runs"
    running, _, joined = steps
    shared = [record for record in log.records if members(record) >= {joined, running}]
    assert {row.phase for row in shared[0].rows} == {"initiation", "increment"}, "both phases in one step"


def members(record: object) -> set[str]:
    return {row.request_id for row in record.rows}  # type: ignore[attr-defined]


def names(log: IterationHistory) -> list[str]:
    return list(dict.fromkeys(row.request_id for record in log.records for row in record.rows))
