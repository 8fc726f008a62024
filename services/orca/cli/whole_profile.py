"""Measures a whole profile: the parts of the model, and the host beside them where it matters."""

import time
from collections.abc import Callable
from dataclasses import replace

from orca.cli.host_load import is_needed, measure_host_load
from orca.planner.profile.measuring.measure import MeasurePlan, measure
from orca.planner.profile.profile import Profile

_HOST_SHARE = 0.1
"""Share of a measurement's time that the loads of the host take."""
_HOST_MAX_S = 24.0


def measure_whole(plan: MeasurePlan, report: Callable[[str], None], *, host: bool = True) -> Profile:
    """Measure a model on this machine.

    Args:
        report: called with a line about the progress now and then.
        host: measure the load of the host if ranks compute on all processors.
    Raises: as `measure`; HostLoadFailed.
    """
    begun_s = time.monotonic()
    profile = measure(replace(plan, minutes=plan.minutes * (1 - _HOST_SHARE)), report)
    if not host or not is_needed(profile.key):
        return profile
    seconds = min(_HOST_MAX_S, 60 * plan.minutes * _HOST_SHARE)
    load = measure_host_load(plan.model, profile.key, seconds=seconds, report=report)
    return replace(profile, host=load, seconds=round(time.monotonic() - begun_s, 1))
