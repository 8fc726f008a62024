"""A scheduler's settings: flags over variables over defaults, and every mistake named."""

import pytest

from orca.core.domain.errors import SettingError
from orca.pool.settings import parse_pool_settings
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy
from orca.scheduler.policy.rra import RoundRobinPolicy
from orca.scheduler.settings import parse_settings

NEEDED = ["--model", "m", "--stages", "h:1,h:2"]
ROUND_ROBIN = [*NEEDED, "--policy", "rra", "--encode-batch", "4", "--decode-steps", "9"]


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    variables = {"ORCA_SCHEDULER_MAX_BATCH_SIZE": "8", "ORCA_SCHEDULER_SLOTS": "640", "HOME": "/"}
    settings = parse_settings([*NEEDED, "--max-batch-size", "4"], variables)
    assert (settings.max_batch_size, settings.slots, settings.block_tokens) == (4, 640, 16)
    assert settings.stages == ("h:1", "h:2")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "m"], "stages"),
        (["--stages", "h:1"], "model"),
        ([*NEEDED, "--max-batch-size", "0"], "--max-batch-size"),
        ([*NEEDED, "--max-batch-size", "many"], "--max-batch-size"),
        ([*NEEDED, "--prefetch", "2"], "prefetch"),
        ([*NEEDED, "--policy", "best"], "policy"),
        ([*NEEDED, "--listen", "here"], "listen"),
        ([*NEEDED, "--stages", "h:0"], "stages"),
        ([*NEEDED, "--group", "two words"], "group"),
        ([*NEEDED, "--max-batch-tokens", "16"], "--max-batch-tokens"),
        ([*NEEDED, "--microbatch-size", "2"], "--microbatch-size"),
        ([*NEEDED, "--policy", "request_level", "--without-habits", "sleeps"], "--without-habits"),
        ([*NEEDED, "--policy", "request_level", "--max-batch-tokens", "99"], "--max-batch-tokens"),
        ([*NEEDED, "--encode-batch", "4"], "--encode-batch"),
        ([*NEEDED, "--decode-steps", "4"], "--decode-steps"),
        ([*NEEDED, "--decode-batch", "4"], "--decode-batch"),
        ([*NEEDED, "--encode-tokens", "4"], "--encode-tokens"),
        ([*NEEDED, "--threshold-percent", "0"], "--threshold-percent"),
        ([*NEEDED, "--policy", "rra", "--encode-batch", "4"], "--decode-steps: the policy rra needs it"),
        ([*NEEDED, "--policy", "rra", "--decode-steps", "4"], "--encode-batch: the policy rra needs it"),
        ([*ROUND_ROBIN, "--encode-batch", "0"], "--encode-batch: 0 is not 1 or more"),
        ([*ROUND_ROBIN, "--decode-steps", "0"], "--decode-steps: 0 is not 1 or more"),
        ([*ROUND_ROBIN, "--threshold-percent", "101"], "--threshold-percent: 101 is not 100 or less"),
        ([*ROUND_ROBIN, "--max-batch-tokens", "64"], "--max-batch-tokens: 64 is not for the policy rra"),
        ([*ROUND_ROBIN, "--max-batch-size", "1"], "--encode-batch: 4 is not at most 2, the number of stages"),
        ([*ROUND_ROBIN, "--decode-batch", "33"], "--decode-batch: 33 is not at most 32, the number of stages"),
        ([*ROUND_ROBIN, "--decode-batch", "3"], "--encode-batch: 4 is not at most decode_batch"),
        ([*ROUND_ROBIN, "--microbatch-size", "3"], "--microbatch-size"),
        ([*NEEDED, "--predecessor-exited", "perhaps"], "--predecessor-exited"),
        ([*NEEDED, "--speed", "high"], "--speed"),
    ],
)
def test_a_mistake_stops_the_start_with_the_name_of_the_setting(flags: list[str], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        parse_settings(flags, {})


def test_an_unknown_variable_stops_the_start() -> None:
    with pytest.raises(SettingError, match="ORCA_SCHEDULER_SPEED"):
        parse_settings(NEEDED, {"ORCA_SCHEDULER_SPEED": "high"})
    with pytest.raises(SettingError, match="ORCA_POOL_DEPTH"):
        parse_pool_settings({"ORCA_POOL_DEPTH": "9"})


def test_the_pools_bounds_come_from_variables_common_to_all_parts() -> None:
    assert parse_pool_settings({"ORCA_POOL_MAX_QUEUED": "7"}).max_queued == 7


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SEAT_LEASE_MS", "999", "seat_lease_ms must be at least 1000"),
        ("READER_LEASE_MS", "1", "reader_lease_ms must be at least 1000"),
        ("CALL_TIMEOUT_MS", "3000", r"call_timeout_ms \(3000\) must be below seat_lease_ms \(3000\)"),
    ],
)
def test_lease_times_too_short_for_a_seat_or_a_reader_are_refused(name: str, value: str, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        parse_pool_settings({f"ORCA_POOL_{name}": value})


def test_policies_get_the_habits_that_are_switched_on() -> None:
    assert parse_settings(NEEDED, {}).make_policy() == IterationPolicy()
    flags = [*NEEDED, "--policy", "request_level", "--microbatch-size", "2", "--without-habits", "computes_ended"]
    expected = RequestLevelPolicy(microbatch_size=2, habits=Habits(computes_ended=False))
    assert parse_settings(flags, {}).make_policy() == expected


def test_the_controls_of_a_cycle_are_bounds_that_may_change() -> None:
    settings = parse_settings(ROUND_ROBIN, {"ORCA_SCHEDULER_DECODE_BATCH": "8"})
    assert settings.make_policy() == RoundRobinPolicy()
    controls = CycleControls(encode_batch=4, decode_steps=9, decode_batch=8, threshold_percent=12)
    assert settings.make_options().cycle == controls
    assert parse_settings(NEEDED, {}).make_options().cycle is None


def test_a_switch_needs_no_value() -> None:
    assert parse_settings([*NEEDED, "--predecessor-exited"], {}).make_options().is_predecessor_dead
    assert not parse_settings([*NEEDED, "--predecessor-exited", "false"], {}).make_options().is_predecessor_dead
