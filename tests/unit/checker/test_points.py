"""Faults injected into a system's processes, and the plans of walks, freezes and cuts."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checker.faults.freezes import NewClaims, standby_command
from checker.faults.injector import PlannedFault
from checker.faults.partitions import plan_partitions
from checker.faults.walk import plan_walk
from checker.points.fault_points import HeldCommits, LateCalls, Trigger
from checker.points.injected import part_of
from checker.points.names import CAME_LATE, DROP_REPLY, KILL_AFTER, LATE_POINTS, POINTS
from checker.systems.spread import LinkCut
from orca.core.domain.request import Token
from orca.core.domain.step import Claim
from orca.pool.records import CommitEntry


def arm(folder: Path, **order: Any) -> None:
    wanted = {"part": "scheduler", "call": "redis.commit", "nth": 1, "action": DROP_REPLY} | order
    (folder / "armed").write_text(json.dumps(wanted))


def test_a_trigger_fires_once_at_the_nth_call_of_its_part_and_call(tmp_path: Path) -> None:
    arm(tmp_path, nth=2)
    scheduler, other = Trigger(tmp_path, "scheduler"), Trigger(tmp_path, "gateway")
    found = [scheduler.action("redis.claim"), scheduler.action("redis.commit"), other.action("redis.commit")]
    assert found == [None, None, None]
    assert [scheduler.action("redis.commit"), scheduler.action("redis.commit")] == [DROP_REPLY, None]
    assert (tmp_path / "fired").exists()


def test_an_order_is_executed_by_one_process_only(tmp_path: Path) -> None:
    arm(tmp_path)
    actions = [Trigger(tmp_path, "scheduler").action("redis.commit") for _ in range(3)]
    assert actions == [DROP_REPLY, None, None]


def test_the_walk_visits_each_point_with_each_action_and_spares_protected_parts() -> None:
    assert len(plan_walk(("gateway", "scheduler", "stage"))) == 3 * len(POINTS) + len(LATE_POINTS)
    without = plan_walk(("scheduler", "stage"))
    assert {stop.action for stop in without if stop.point.part == "gateway"} == {DROP_REPLY}
    late = [stop.name for stop in plan_walk(("scheduler", "stage")) if stop.is_late]
    assert late == ["worker serve.Run: come late", "scheduler pool.commit: outlive"]
    assert [stop.name for stop in plan_walk(("scheduler",), only="redis.commit: kill after")] == [
        f"scheduler redis.commit: {KILL_AFTER}"
    ]


async def test_a_delayed_call_runs_once_and_its_failure_affects_nobody(tmp_path: Path) -> None:
    late, came = LateCalls(tmp_path), []

    async def step() -> None:
        came.append("step")
        raise ConnectionError("whoever asked has gone")

    late.hold(step)
    await late.replay()
    await late.replay()
    assert came == ["step"]
    assert (tmp_path / CAME_LATE).exists()


async def test_a_delayed_commit_arrives_after_its_requests_are_claimed_again(tmp_path: Path) -> None:
    entry = CommitEntry(request_id="a.0", claim=Claim(1, "s/1"), index=0, tokens=(Token(5),))
    came: list[Sequence[CommitEntry]] = []

    async def commit(entries: Sequence[CommitEntry]) -> None:
        came.append(entries)

    HeldCommits(tmp_path).hold([entry, replace(entry, request_id="b.0")])
    for claimed in ({"c.0"}, {"a.0"}, {"a.0"}):
        await HeldCommits(tmp_path).replay(claimed, commit)
    assert came == [[entry]]


def test_parts_are_identified_by_their_command_line() -> None:
    assert part_of(["python", "-m", "orca.cli.main", "worker", "--stage", "0"]) == "worker"
    assert part_of(["python", "-m", "orca.cli.main", "up"]) is None
    assert part_of(["python", "-m", "orca.worker.rank.rank", "5"]) is None


def test_a_standby_has_its_own_addresses_and_log() -> None:
    words = "python -m orca.cli.main scheduler --listen a:1 --group g --metrics-listen a:2 --iteration-log /x/s.jsonl"
    changed = standby_command([*words.split(), "--predecessor-exited"])
    assert "--predecessor-exited" not in changed
    assert changed[changed.index("--group") + 1] == "g"
    assert changed[changed.index("--iteration-log") + 1] == "/x/s-standby.jsonl"
    assert changed[changed.index("--listen") + 1] not in ("a:1", changed[changed.index("--metrics-listen") + 1])


def test_each_link_is_cut_both_ways_and_each_way_alone() -> None:
    names = [partition.name for partition in plan_partitions()]
    assert names[:3] == ["scheduler <> redis", "scheduler > redis", "redis > scheduler"]
    assert "stage1 > stage0 data" in names


def test_a_cut_drops_traffic_in_one_direction_only() -> None:
    assert LinkCut("scheduler", "redis").rules() == [["-d", "10.77.0.2", "-j", "DROP"]]
    [data] = LinkCut("stage0", "stage1", "data").rules()
    assert data[:4] == ["-d", "10.77.0.11", "-p", "tcp"]
    assert "--dport" in LinkCut("stage0", "stage1", "control").rules()[0]


def test_a_frozen_scheduler_wakes_when_another_one_has_claimed(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    record = tmp_path / "records" / "scheduler-7.jsonl"
    record.write_text('{"what": "claimed"}\n')
    has_claimed = NewClaims(tmp_path)
    freeze = PlannedFault(kind="freeze", roles=("scheduler",), after_tokens=1, delay_s=0.0, choice=0.0, seconds=9.0)
    assert not has_claimed(freeze)
    record.write_text('{"what": "claimed"}\n{"what": "claimed"}\n')
    assert has_claimed(freeze)
    assert not has_claimed(replace(freeze, roles=("rank",)))
