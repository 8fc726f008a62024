"""The speed of the machine, measured by processes that wait for their turn."""

import pytest

from orca.bench.plan.machine_speed import running_speed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_each_measurement_counts_what_all_processes_do() -> None:
    with running_speed(2) as speed:
        assert min(speed.measure(), speed.measure()) > 0
