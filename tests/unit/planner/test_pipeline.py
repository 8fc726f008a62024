"""Jobs in a pipeline wait for stages, for a place, and for the tokens that they need."""

import pytest

from orca.planner.simulate.layout import Layout
from orca.planner.simulate.pipeline import Job, run_pipeline, steady_period


def test_a_slower_job_delays_those_after_it_on_each_stage() -> None:
    run = run_pipeline([Job((1, 1)), Job((4, 4)), Job((1, 1), after=0), Job((1, 1), after=1)], window=2, prefetch=0)
    # Job 1 runs on stage 0 from 1 to 5. Job 2 follows it there, and waits for it again on stage 1.
    assert run.submitted == (0, 0, 2, 9)
    assert run.returned == (2, 9, 10, 11)


@pytest.mark.parametrize(("prefetch", "returned"), [(0, (10, 25, 40)), (1, (10, 20, 30))])
def test_the_host_time_comes_between_steps_unless_the_next_is_there_already(
    prefetch: int, returned: tuple[int, ...]
) -> None:
    jobs = [Job((10,), 5, None if number == 0 else number - 1) for number in range(3)]
    run = run_pipeline(jobs, window=1, prefetch=prefetch)
    assert tuple(time - 5 for time in run.returned) == returned


@pytest.mark.parametrize("times", [(5.0,), (5.0, 5.0), (5.0, 3.0, 9.0), (1.0, 1.0, 7.0, 1.0)])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("host_us", [0.0, 2.0, 40.0])
def test_the_steady_period_is_that_of_many_equal_jobs(times: tuple[float, ...], prefetch: int, host_us: float) -> None:
    window = len(times)
    jobs = [Job(times, host_us, number - window if number >= window else None) for number in range(121)]
    run = run_pipeline(jobs, window=window, prefetch=prefetch)
    expected = steady_period(times, window=window, host_us=host_us, prefetch=prefetch)
    assert run.period(60) == pytest.approx(expected, rel=0.02)


def test_a_layout_counts_its_devices() -> None:
    layout = Layout((10, 6, 8), ranks=2)
    assert (layout.stages, layout.devices, str(layout)) == (3, 6, "3 x 2 (10,6,8)")


@pytest.mark.parametrize(("layers", "ranks"), [((), 1), ((3, 0), 1), ((3,), 0)])
def test_an_impossible_layout_is_refused(layers: tuple[int, ...], ranks: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Layout(layers, ranks)
