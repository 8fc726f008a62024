"""The times of jobs that pass through the stages of a pipeline: a recursion that gives every bubble.

A job is a step: each stage runs it for some time, one job after the other. As many jobs as stages are in flight, so job
n enters when job n - stages has returned, and when the last step of its own requests has. Without prefetch the host
time of a result comes in between. With prefetch the next job waits at the first stage already; it still needs tokens.

The recursion is that of the simulated engine (scheduler/engines/simulated_engine.py) under `policy.next_batch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

StageTimes = Sequence[float]
"""Microseconds of one step on each stage."""


@dataclass(frozen=True, slots=True)
class Job:
    """One step on its way through the stages."""

    times: StageTimes
    host_us: float = 0.0  # of its result's way to the scheduler and of the next step's way back
    after: int | None = None  # number of the job that draws the tokens which this one needs; None: it needs none


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Times of jobs in microseconds, in the order in which they enter."""

    submitted: tuple[float, ...]  # the job is chosen: the oldest one in flight has returned
    returned: tuple[float, ...]  # the last stage is done, and the host has the result

    def period(self, first: int) -> float:
        """Return the mean time between two jobs, from job `first` on."""
        return (self.returned[-1] - self.returned[first]) / (len(self.returned) - 1 - first)


def run_pipeline(jobs: Sequence[Job], *, window: int, prefetch: int) -> PipelineTimes:
    """Run jobs through an empty pipeline.

    Args:
        window: jobs in flight: the number of stages.
        prefetch: 1 if a job may be submitted before the results of the oldest in flight, and of `after`, are here.
    """
    free = [0.0] * len(jobs[0].times)
    submitted: list[float] = []
    returned: list[float] = []
    drawn: list[float] = []  # times at which the last stage had drawn the tokens of each job
    for number, job in enumerate(jobs):
        reader = number - window - prefetch
        entry = returned[reader] if reader >= 0 else 0.0
        if number and entry < submitted[-1]:
            entry = submitted[-1]
        end = entry
        if job.after is not None:
            end = max(end, drawn[job.after])
            if not prefetch:
                entry = end = max(entry, returned[job.after])
        submitted.append(entry)
        for stage, time in enumerate(job.times):
            if free[stage] > end:
                end = free[stage]
            end += time
            free[stage] = end
        drawn.append(end)
        returned.append(end + job.host_us)
    return PipelineTimes(tuple(submitted), tuple(returned))


def steady_period(times: StageTimes, *, window: int, host_us: float, prefetch: int) -> float:
    """Return the time between two of many equal jobs: that of the slowest stage, or of the way through all of them."""
    way = sum(times)
    if not prefetch:
        return max(max(times), (way + host_us) / window)
    return max(max(times), way / window, (way + host_us) / (window + 1))
