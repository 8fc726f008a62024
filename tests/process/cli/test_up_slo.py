"""`orca up --slo-latency-ms` with a kept profile: it plans, runs the plan, and answers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orca.cli.small_model import small_model_folder
from orca.cli.up.plan import DEPLOYMENT
from orca.cli.up.planned import given_options
from orca.cli.up.redis_child import RedisChild
from orca.cli.up.settings import parse_settings
from orca.cli.up.slo.lengths import read_counts
from orca.cli.up.slo.profiles import keep_profile
from orca.cli.up.slo.start import read_order
from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.model import load_model_info
from orca.planner.search.plan import read_plan
from orca.scheduler.settings import CYCLE_SETTINGS
from support.cli.processes import is_running, wait_until_gone
from support.cli.up import UP_WITHIN_S, Up, completion
from support.planner.profiles import profile_for

pytestmark = pytest.mark.timeout(600)

# Few slots and one layout: the search takes a second.
FLAGS = ["--slo-latency-ms", "60000", "--policy", "rra", "--stages", "1", "--tensor", "1", "--slots", "64"]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a cache with a profile for FLAGS, made by hand, and the compiled kernels of this machine."""
    cache = tmp_path / "cache"
    kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orca" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "orca").mkdir(parents=True)
    (cache / "orca" / "kernels").symlink_to(kernels)
    order = read_order(parse_settings(FLAGS), given_options(FLAGS), load_model_info(small_model_folder()), 0)
    said: list[str] = []
    keep_profile(cache / "orca" / "profiles", profile_for(order.key), said.append)
    assert not said
    return cache


def policy_in_force(up: Up) -> str:
    """Return the policy that the scheduler says it has, with its controls."""
    log = (up.folder / "data" / "logs" / "scheduler-0.log").read_text()
    [policy] = [entry["policy"] for entry in map(json.loads, log.splitlines()) if "policy" in entry]
    return str(policy)


def test_a_start_with_a_bound_runs_its_plan_and_answers(tmp_path: Path, cache: Path) -> None:
    up = Up(tmp_path, *FLAGS, "--slo-workload", "8/4", environment={"XDG_CACHE_HOME": str(cache)})
    try:
        up.wait_until_ready()
        plan = read_plan(tmp_path / "data" / "plan.json")
        assert f"slo: {plan.describe()}" in up.output
        assert "measuring" not in up.output
        controls = {name: getattr(plan.schedule.bounds, name) for name in CYCLE_SETTINGS}
        assert controls["encode_batch"]
        words = ", ".join(f"{name} {value}" for name, value in controls.items() if value is not None)
        assert policy_in_force(up) == f"rra({words})"
        assert completion(up)
    finally:
        up.end()


def test_a_signal_while_the_model_is_measured_ends_everything(tmp_path: Path, cache: Path) -> None:
    # No profile is kept for two threads.
    flags = [*FLAGS, "--slo-workload", "8/4", "--threads", "2"]
    up = Up(tmp_path, *flags, environment={"XDG_CACHE_HOME": str(cache)})
    try:
        up.wait_until(lambda: "profile: " in up.output)
        # Redis, the measurement, and at least one process that times steps.
        up.wait_until(lambda: len([part for part in up.family() if is_running(part)]) >= 3)
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(UP_WITHIN_S) == -signal.SIGTERM
        wait_until_gone(up.seen, UP_WITHIN_S)
    finally:
        up.end()


def test_a_start_without_a_bound_does_not_import_the_planner() -> None:
    program = """
import sys
from orca.cli.up import main
from orca.cli.up.settings import parse_settings
assert parse_settings([]).slo_latency_ms is None
print([name for name in sys.modules if name.startswith(("orca.planner", "orca.cli.up.slo."))])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "['orca.cli.up.slo.settings']\n"


def test_the_lengths_of_a_pool_are_read_before_any_part_runs(tmp_path: Path) -> None:
    redis = RedisChild(tmp_path / "redis", DEPLOYMENT, fsync="everysec")
    try:
        lengths, latencies = asyncio.run(read_counts(redis.url, "a revision", {**os.environ, **redis.login}))
        assert (lengths.answers, latencies.answers) == (0, 0)
    finally:
        asyncio.run(redis.stop())


def test_a_pool_that_cannot_be_reached_is_an_error_of_the_pool(tmp_path: Path) -> None:
    with pytest.raises(PoolUnavailable):
        asyncio.run(read_counts(f"unix://{tmp_path}/redis.sock", "a revision", os.environ))
