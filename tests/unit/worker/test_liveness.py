"""worker.controller.liveness and worker.parallel.progress: which rank has hung, and which only takes long."""

import os
import re
import time

import pytest

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.step import Epoch, Row, Step
from orca.core.process.cpu_time import cpu_time_s
from orca.worker.controller.liveness import AwakeClock, RankLiveness, liveness_failure, stage_still_s
from orca.worker.controller.rank_process import RankProcess
from orca.worker.parallel.progress import RankProgress
from orca.worker.settings import WorkerSettings

SETTINGS = WorkerSettings(model="/m")  # 5 s, and 60 s while loading


def signs(**told: object) -> RankLiveness:
    """Return the signs of a healthy idle rank, unless the test says otherwise."""
    healthy: dict[str, object] = {"is_loaded": True, "silent_s": 0.2, "still_s": 0.2, "is_waiting": True, "units": 1}
    return RankLiveness(**(healthy | {"doing": "computes"} | told))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "alive",
    [
        signs(still_s=9_000.0),  # idle for hours
        signs(is_waiting=False, still_s=4.9),
        signs(is_waiting=False, still_s=19.0, units=4),  # a prompt of 4,000 tokens
        signs(is_loaded=False, is_waiting=False, silent_s=59.0, still_s=59.0),
    ],
)
def test_a_rank_that_idles_works_or_loads_within_its_bounds_is_kept(alive: RankLiveness) -> None:
    assert liveness_failure(alive, SETTINGS) is None


@pytest.mark.parametrize(
    ("hung", "reason"),
    [
        (signs(silent_s=5.1), r"sent nothing for 5\.1 s"),
        (signs(is_waiting=False, still_s=5.1), r"stood still for 5\.1 s \(computes\)"),
        (signs(is_waiting=False, still_s=20.1, units=4), "stood still"),
        (signs(is_loaded=False, silent_s=60.1, still_s=60.1), "read nothing for 60.1 s"),
        (signs(is_loaded=False, silent_s=0.1, still_s=60.1), "read nothing"),  # its heartbeat alone is no progress
    ],
)
def test_a_rank_that_is_silent_or_stands_still_past_its_bound_is_killed(hung: RankLiveness, reason: str) -> None:
    assert re.search(reason, liveness_failure(hung, SETTINGS) or "lives")


def test_computing_counts_as_progress_of_loading_but_a_heartbeat_does_not() -> None:
    told = {"now": 0.0, "computed_s": 0.0}
    rank = RankProcess(
        0,
        clock=lambda: told["now"],
        on_result=print,
        on_broken=print,
        on_death=print,
        cpu_time_s=lambda _: told["computed_s"],
    )
    for now, computed_s, still_s in ((50.0, 0.4, 50.0), (60.0, 0.9, 0.0), (115.0, 0.95, 55.0), (121.0, 1.0, 61.0)):
        told.update(now=now, computed_s=computed_s)
        assert rank.state.liveness.still_s == still_s


def test_the_cpu_time_of_a_process_is_none_without_the_process() -> None:
    before = cpu_time_s(os.getpid())
    while cpu_time_s(os.getpid()) < before + 0.05:
        pass
    assert before <= time.process_time()
    assert cpu_time_s(None) == 0.0


def test_a_stage_is_stalled_since_its_last_rank_made_progress_and_never_while_one_works() -> None:
    assert stage_still_s([signs(still_s=9.0), signs(still_s=3.0)]) == 3.0
    assert stage_still_s([signs(still_s=9.0), signs(still_s=3.0, is_waiting=False)]) == 0.0
    assert stage_still_s([signs(still_s=9.0), signs(still_s=9.0, is_loaded=False)]) == 0.0
    assert stage_still_s([]) == 0.0


def test_a_wait_during_a_first_step_counts_for_a_part_of_its_time() -> None:
    assert stage_still_s([signs(still_s=24.0, units=12)]) == 2.0


def test_time_in_which_the_controller_itself_was_stopped_counts_as_a_second_at_most() -> None:
    clock = AwakeClock()
    for now in (100.0, 100.25, 100.5, 400.5, 400.75):
        clock.advance(now)
    assert clock.seconds == 1.75


def step(tokens: int) -> Step:
    row = Row(handle=1, start=0, count=tokens, sample=True)
    return Step(epoch=Epoch(1, "test"), number=1, new=(new_request(1, (1,) * tokens, 1),), rows=(row,))


def test_a_layers_bound_grows_per_1024_tokens_and_in_the_first_step_of_a_process() -> None:
    progress = RankProgress()
    units = []
    for tokens in (1, 1, 1024, 1025, 5000):
        progress.begin_step(step(tokens))
        units.append(progress.units)
        progress.end_step(step(tokens))
    assert units == [12, 1, 1, 2, 5]


def test_a_step_without_rows_is_no_first_step() -> None:
    progress = RankProgress()
    freeing = Step(epoch=Epoch(1, "test"), number=1, freed=(1,))
    progress.begin_step(freeing)
    progress.end_step(freeing)
    progress.begin_step(step(1))
    assert progress.units == 12


def test_a_wait_for_another_rank_is_not_its_own_stall_and_its_end_is_progress() -> None:
    progress = RankProgress()
    progress.at("computes")
    mark = progress.mark
    with progress.waiting():
        assert progress.is_waiting
    assert not progress.is_waiting
    assert progress.mark == mark + 1


def test_a_failed_wait_is_recorded_so_that_the_other_rank_gives_the_cause() -> None:
    progress = RankProgress()
    progress.at("computes")
    with pytest.raises(RuntimeError), progress.waiting():
        raise RuntimeError("connection closed by peer")
    assert progress.is_waiting
