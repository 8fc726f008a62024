"""The loop's iterations on virtual time: joins, leaves, successors, and commits beside the steps."""

import asyncio
import random
from itertools import pairwise
from typing import Any

import orjson
import pytest

from orca.pool.records import CommitAnswer, CommitEntry
from orca.scheduler.dependencies import LoopTimings
from orca.scheduler.engines import virtual_time
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from orca.scheduler.observer import IterationLogFile
from orca.scheduler.policy.iteration import IterationPolicy
from support.scheduler.scheduler_simulation import (
    Group,
    Simulation,
    a_request,
    a_shape,
    a_simulation,
    batches,
    schedule_all,
    serving,
    some_limits,
    steps_of,
    tokens_at_least,
    virtually,
)


@virtually
async def test_a_late_request_joins_and_an_early_one_leaves_while_others_run() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape())
    simulation.start(group)
    await simulation.submit(a_request("A", new=20))
    await simulation.submit(a_request("B", new=4))
    await tokens_at_least(simulation, "B.0", 2)
    await simulation.submit(a_request("C", new=3))
    await simulation.finish()

    a, b, c = (steps_of(group, name) for name in ("A.0", "B.0", "C.0"))
    assert a == list(range(a[0], a[0] + 20)), "A runs in every iteration"
    assert a[0] < c[0], "C came late"
    assert max(b[-1], c[-1]) < a[-1], "B and C left early"


@virtually
async def test_the_successor_of_a_request_that_ends_by_length_starts_in_the_very_next_step() -> None:
    simulation = a_simulation(choices=SchedulingOptions(max_batch_size=1))
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=50_000))
    simulation.start(group)
    for name in "ABC":
        await simulation.submit(a_request(name, new=2))
    await simulation.finish()
    names = ["".join(row.request_id[0] for row in record.rows) for record in group.records]
    assert names == ["A", "A", "B", "B", "C", "C", ""]
    assert group.records[2].freed == ("A.0",)


@virtually
async def test_a_request_that_waits_for_slots_starts_in_the_step_that_frees_them() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(slots=16))
    simulation.start(group)
    for name in "AB":
        await simulation.submit(a_request(name, prompt=8, new=4))
    await simulation.finish()
    assert steps_of(group, "A.0") + steps_of(group, "B.0") == list(range(1, 9))
    assert {group.records[i + 1].submitted_ns - group.records[i].returned_ns for i in range(8)} == {0}


@virtually
async def test_a_place_freed_by_an_early_end_is_filled_while_other_batches_are_in_flight() -> None:
    simulation = a_simulation(tokens=lambda request_id, index: int(request_id == "A.0" and index == 1), eos=(1,))
    simulation.choices = SchedulingOptions(max_batch_size=1)
    group = simulation.add_group(a_shape(stages=2), cost=LinearCost(step_us=100_000))
    await simulation.queue_up(a_request(name, new=5) for name in "ABC")
    simulation.start(group)
    await simulation.finish()
    names = "".join(row.request_id[0] for record in group.records for row in record.rows)
    assert names[:6] == "ABABCB", "C takes the turn that A left, before B has returned"


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_those_of_algorithm_1_with_early_ends_and_claims_from_the_pool(seed: int) -> None:
    chance = random.Random(seed)
    stages, max_batch_size = chance.choice((1, 1, 2)), chance.randint(1, 3)
    requests = [a_request(name, new=chance.randint(1, 7)) for name in "ABCDEFG"]
    lasts = {request.id: chance.randint(0, 8) for request in requests}  # index of the token that ends it early

    async def looped() -> list[str]:
        simulation = a_simulation(tokens=lambda name, index: int(index == lasts[name]), eos=(1,), delay_ms=0.5)
        simulation.choices = SchedulingOptions(max_batch_size=max_batch_size)
        group = simulation.add_group(a_shape(stages=stages, slots=4096), cost=LinearCost(step_us=30_000))
        await simulation.queue_up(requests)
        simulation.start(group)
        await simulation.finish()
        return ["".join(row.request_id[0] for row in record.rows) for record in group.records if record.rows]

    limits = some_limits(stages=stages, max_batch_size=max_batch_size)
    wanted = schedule_all(IterationPolicy(), limits, requests, ends=lambda request, index: index == lasts[request.id])
    assert virtual_time.run(looped()) == [batch for batch in batches(wanted) if batch]


@virtually
async def test_steps_continue_while_the_answer_to_a_claim_is_late() -> None:
    simulation = a_simulation(
        tokens=lambda name, index: int(name == "A.0" and index == 1), eos=(1,), timings=LoopTimings(flush_s=5.0)
    )
    simulation.choices = SchedulingOptions(max_batch_size=2)
    group = simulation.add_group(a_shape(slots=4096), cost=LinearCost(step_us=10_000))
    await simulation.queue_up(a_request(name, new=12) for name in "ABC")
    simulation.start(group)
    await tokens_at_least(simulation, "B.0", 1)
    simulation.delay_calls(group, 400.0)
    await simulation.finish()
    steps_of_b = [record for record in group.records if record.rows and record.rows[-1].request_id == "B.0"]
    gaps_ms = [(after.submitted_ns - before.returned_ns) / 1e6 for before, after in pairwise(steps_of_b)]
    assert [gap for gap in gaps_ms if gap > 1] == [LoopTimings().claim_s * 1000], "one step waits, and not for long"


@virtually
async def test_an_idle_scheduler_starts_a_request_at_once_when_the_pool_hints_at_it() -> None:
    simulation = a_simulation(timings=LoopTimings(work_s=60.0))
    group = simulation.add_group(a_shape())
    simulation.start(group)
    await serving(simulation, group)
    await asyncio.sleep(10)
    submitted_ns = simulation.clock.monotonic_ns()
    await simulation.submit(a_request("A", new=1))
    await simulation.finish()
    assert group.records[0].submitted_ns - submitted_ns < 1_000_000


@virtually
async def test_steps_never_wait_for_commits() -> None:
    simulation = a_simulation(delay_ms=100.0, timings=LoopTimings(flush_s=5.0))
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=1_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=20))
    await simulation.finish()
    took_ns = group.records[19].returned_ns - group.records[0].submitted_ns
    assert round(took_ns / 1e6) == 20, "twenty steps of a millisecond, though a commit takes a hundred"
    assert (await simulation.log_of("A.0"))[0] == simulation.expected(simulation.submitted["A.0"])[0]


@virtually
async def test_within_the_commit_interval_only_first_tokens_and_ends_are_sent() -> None:
    simulation = a_simulation(timings=LoopTimings(commit_s=0.1))
    commits = commits_of(simulation)
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=10_000))
    simulation.start(group)
    await serving(simulation, group)
    await simulation.submit(a_request("A", new=19))
    await simulation.submit(a_request("B", new=7))
    await tokens_at_least(simulation, "B.0", 7)
    await simulation.submit(a_request("C", new=30))
    await simulation.finish()
    written = [commit for commit in commits if commit]
    assert written[0] == [("A.0", 0, 1), ("B.0", 0, 1)]
    assert written[1] == [("B.0", 1, 6)], "its end, with what it wrote before; A waits"
    assert written[2] == [("C.0", 0, 1)], "its first token"
    assert [len(commit) for commit in written[3:5]] == [2, 1], "A and C together, when the interval is over; A's end"
    first, end = written[3][0], written[4][0]
    assert (first[0], end[0]) == ("A.0", "A.0")
    assert first[2] + end[2] == 18
    for request in simulation.submitted.values():
        assert (await simulation.log_of(request.id))[0] == simulation.expected(request)[0]


@virtually
async def test_a_first_token_that_waited_long_also_waits_for_the_interval_while_others_queue() -> None:
    simulation, commits = await one_place(commit_s=0.1)
    await simulation.queue_up(a_request(name, new=new) for name, new in (("A", 400), ("B", 25), ("C", 25)))
    await simulation.queue_up([a_request("S", new=25, deadline_ms=60_000), a_request("D", new=25)])
    await simulation.finish()
    firsts = {entry[0]: entry[2] for commit in commits for entry in commit if entry[1] == 0}
    assert firsts["A.0"] == 1, "it came just now"
    assert firsts["B.0"] > 1, "it has waited for four seconds, and others wait behind it"
    assert firsts["S.0"] == 1, "it has a deadline"
    assert firsts["D.0"] == 1, "nobody waits behind it"
    [end] = [commit for commit in commits for entry in commit if entry[0] == "B.0" and sum(entry[1:]) == 25]
    assert [entry[0] for entry in end] == ["B.0", "C.0"], "its end comes with what the next one has by then"
    for request in simulation.submitted.values():
        assert (await simulation.log_of(request.id))[0] == simulation.expected(request)[0]


@virtually
async def test_while_requests_queue_the_commit_interval_doubles() -> None:
    simulation, commits = await one_place(commit_s=0.1)
    await simulation.queue_up([a_request("A", new=100), a_request("B", new=100)])
    await simulation.finish()
    sizes = {name: [entry[2] for commit in commits for entry in commit if entry[0] == name] for name in ("A.0", "B.0")}
    while_b_waits, with_nobody_behind = (set(sizes[name][1:-1]) for name in ("A.0", "B.0"))  # in steps of 10 ms
    assert while_b_waits
    assert while_b_waits <= {19, 20, 21}
    assert with_nobody_behind
    assert with_nobody_behind <= {9, 10, 11}


@virtually
async def test_a_stopping_scheduler_does_not_wait_for_the_commit_interval() -> None:
    simulation = a_simulation(timings=LoopTimings(commit_s=3600.0))
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=10_000))
    simulation.start(group)
    await serving(simulation, group)
    await simulation.submit(a_request("A", new=40))
    await tokens_at_least(simulation, "A.0", 1)
    await asyncio.sleep(0.1)
    before_ns = simulation.clock.monotonic_ns()
    assert len((await simulation.log_of("A.0"))[0]) == 1, "the rest waits for the interval"
    await simulation.stop()
    assert simulation.clock.monotonic_ns() - before_ns < 1_000_000_000
    tokens, _ = await simulation.log_of("A.0")
    assert len(tokens) == len(steps_of(group, "A.0")) > 10


async def one_place(commit_s: float) -> tuple[Simulation, list[list[tuple[str, int, int]]]]:
    """A simulation whose one group runs a request at a time, in steps of 10 ms, and gets its `commits_of`."""
    simulation = a_simulation(timings=LoopTimings(commit_s=commit_s))
    simulation.choices = SchedulingOptions(max_batch_size=1)
    commits = commits_of(simulation)
    group = simulation.add_group(a_shape(slots=4096, max_model_len=4096), cost=LinearCost(step_us=10_000))
    simulation.start(group)
    await serving(simulation, group)
    return simulation, commits


def commits_of(simulation: Simulation) -> list[list[tuple[str, int, int]]]:
    """Collect the commits of the schedulers from now on: the request, first index and tokens of each entry."""
    commits: list[list[tuple[str, int, int]]] = []
    commit = simulation.pool.commit

    async def recorded(entries: list[CommitEntry]) -> list[CommitAnswer]:
        commits.append([(entry.request_id, entry.index, len(entry.tokens)) for entry in entries])
        return await commit(entries)

    simulation.pool.commit = recorded  # type: ignore[method-assign, assignment]
    return commits


def test_the_iteration_log_file_has_a_line_for_each_step(tmp_path: Any) -> None:
    async def main() -> Group:
        simulation = a_simulation()
        group = simulation.add_group(a_shape())
        simulation.start(group)
        await simulation.submit(a_request("A", prompt=3, new=2))
        await simulation.finish()
        return group

    group = virtual_time.run(main())
    with IterationLogFile(tmp_path / "steps.jsonl") as file:
        for record in group.records:
            file.iterated(record)
        # Before the file is closed: a scheduler that is killed leaves every line.
        written = (tmp_path / "steps.jsonl").read_bytes()
    lines = [orjson.loads(line) for line in written.splitlines()]
    assert [line["rows"] for line in lines] == [[["A.0", "initiation", 0, 3]], [["A.0", "increment", 3, 1]], []]
    assert [line["freed"] for line in lines] == [[], [], ["A.0"]]
    assert [line["returned_ns"] - line["submitted_ns"] for line in lines] == [1_000_000, 1_000_000, 0]
