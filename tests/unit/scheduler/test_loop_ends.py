"""Requests of a running loop end on virtual time: by their tokens, by cancel, by their deadline."""

import asyncio

from orca.core.domain.request import End, FinishReason, Request, Token
from orca.pool.latency_bins import AnswerLatency
from orca.pool.records import Caller, CommitEntry
from orca.scheduler.dependencies import LoopTimings
from orca.scheduler.engines.step_cost import LinearCost
from orca.scheduler.loop import SchedulingOptions
from support.scheduler.scheduler_simulation import (
    REVISION,
    a_request,
    a_shape,
    a_simulation,
    by_index,
    tokens_at_least,
    virtually,
)


@virtually
async def test_eos_ends_a_request_and_is_the_last_token_of_its_log() -> None:
    simulation = a_simulation(tokens=by_index(lambda index: 9 if index == 2 else 5), eos=(9,))
    simulation.start(simulation.add_group(a_shape()))
    await simulation.submit(a_request("A", new=8))
    await simulation.submit(a_request("B", new=4, ignore_eos=True))
    await simulation.submit(a_request("C", new=8, min_tokens=3))
    await simulation.submit(a_request("D", new=8, stop_token_ids=(5,), min_tokens=1))
    await simulation.finish()
    a, b, c, d = [await simulation.log_of(f"{name}.0") for name in "ABCD"]
    assert (a[0], a[1].reason, a[1].stop) == ([5, 5, 9], FinishReason.STOP, None)
    assert (len(b[0]), b[1].reason) == (4, FinishReason.LENGTH)
    assert (len(c[0]), c[1].reason) == (8, FinishReason.LENGTH), "the only EOS came before min_tokens"
    assert (d[0], d[1].reason, d[1].stop) == ([5, 5], FinishReason.STOP, 5)


@virtually
async def test_a_forced_last_token_ends_a_request_by_its_length() -> None:
    tokens = by_index(lambda index: 9 if index == 3 else 5)
    simulation = a_simulation(tokens=tokens, eos=(9,), forces_last_token=True)
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=100_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=4))
    await simulation.submit(a_request("B", new=8))
    await simulation.submit(a_request("C", new=4, stop_token_ids=(9,), ignore_eos=True))
    await tokens_at_least(simulation, "A.0", 2)
    await simulation.crash(group)
    simulation.start(group)
    await simulation.finish()
    for name, reason in (("A", FinishReason.LENGTH), ("B", FinishReason.STOP), ("C", FinishReason.LENGTH)):
        assert await simulation.log_of(f"{name}.0") == ([5, 5, 5, 9], End(reason, 4))


class LettersText:
    """Token n is the n-th letter; the text stops where a stop string ends."""

    def __init__(self, request: Request) -> None:
        self._stops = request.sampling.stop
        self._text = ""
        self.stop: str | None = None

    def push(self, token_id: int, /) -> "LettersText":
        self._text += chr(97 + token_id)
        self.stop = next((stop for stop in self._stops if self._text.endswith(stop)), None)
        return self


@virtually
async def test_a_stop_string_that_began_under_another_owner_ends_a_request() -> None:
    simulation = a_simulation(tokens=by_index(int), make_stop_string_matcher=LettersText)
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=100_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=20, stop=("defg",)))
    await tokens_at_least(simulation, "A.0", 5)
    await simulation.crash(group)
    simulation.start(group)
    await simulation.finish()
    tokens, end = await simulation.log_of("A.0")
    assert tokens == [0, 1, 2, 3, 4, 5, 6]
    assert end is not None
    assert (end.reason, end.stop) == (FinishReason.STOP, "defg")


@virtually
async def test_a_log_that_another_release_wrote_past_its_end_ends_after_its_last_entry() -> None:
    """Clients have it: to end before it is refused, and would be tried again for ever."""
    simulation = a_simulation(eos=(2,))
    await simulation.pool.set_revision(REVISION, 1)
    await simulation.submit(a_request("A", new=8))
    older = Caller(group="g9", process="older", revision=REVISION)
    await simulation.pool.enter(older, 1, reported_epoch=0)
    (claimed,) = (await simulation.pool.claim(older, 2, free_slots=64, total_slots=64, block_tokens=1, most=1)).claimed
    written = (Token(5), Token(2), Token(6))
    await simulation.pool.commit([CommitEntry(request_id="A.0", claim=claimed.claim, index=0, tokens=written)])
    await simulation.pool.leave(older)
    group = simulation.add_group(a_shape())
    simulation.start(group)
    await simulation.finish()
    assert await simulation.log_of("A.0") == ([5, 2, 6], End(FinishReason.STOP, 3))
    assert [record for record in group.records if record.rows] == []


@virtually
async def test_a_cancelled_request_stops_as_soon_as_a_commit_is_refused() -> None:
    simulation = a_simulation(timings=LoopTimings(heartbeat_s=2.0))
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=10_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=60))
    await tokens_at_least(simulation, "A.0", 3)
    await simulation.pool.cancel("A")
    await asyncio.sleep(0.025)
    assert group.scheduler is not None
    assert group.scheduler.load().running == 0
    await simulation.finish()


@virtually
async def test_a_cancelled_request_stops_within_a_heartbeat_also_when_it_has_nothing_to_commit() -> None:
    simulation = a_simulation(choices=SchedulingOptions(max_batch_size=1, prefetch=0))
    group = simulation.add_group(a_shape(stages=2), cost=LinearCost(step_us=1_000_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=5))
    await asyncio.sleep(0.5)
    await simulation.pool.cancel("A")
    await asyncio.sleep(0.6)
    assert group.scheduler is not None
    assert group.scheduler.state is not None
    assert [entry.is_ended for entry in group.scheduler.state.requests] == [True]
    await simulation.finish()


@virtually
async def test_a_request_whose_deadline_passes_while_it_runs_gives_its_slots_back() -> None:
    simulation = a_simulation()
    group = simulation.add_group(a_shape(), cost=LinearCost(step_us=50_000))
    simulation.start(group)
    await simulation.submit(a_request("A", new=40, deadline_ms=1_000))
    await simulation.finish()
    tokens, end = await simulation.log_of("A.0")
    assert end is not None
    assert end.reason is FinishReason.DEADLINE_EXCEEDED
    assert 10 <= len(tokens) <= 30
    assert simulation.clock.wall_ms() < 2_500


@virtually
async def test_the_pool_learns_when_the_first_step_of_a_request_began() -> None:
    """Both are claimed at once. The prompt of the first one fills ten steps, so the second one waits for its turn."""
    simulation = a_simulation(choices=SchedulingOptions(max_batch_size=4, max_batch_tokens=10))
    shape = a_shape(slots=512, max_model_len=256)
    simulation.start(simulation.add_group(shape, cost=LinearCost(step_us=100_000)))
    await simulation.submit(a_request("A", prompt=100, new=2))
    await simulation.submit(a_request("B", prompt=10, new=2))
    await simulation.finish()
    first, second = (simulation.pool.state.records[f"{name}.0"] for name in "AB")
    waited_ms = [
        record.first_step_ms - record.first_claimed_ms
        for record in (first, second)
        if record.first_step_ms is not None and record.first_claimed_ms is not None
    ]
    assert waited_ms[0] <= 100
    assert 900 <= waited_ms[1] <= 1200
    counts = await simulation.pool.latencies(REVISION)
    sequence_s, request_s = (counts.percentile_s(kind, 50) for kind in (AnswerLatency.SEQUENCE, AnswerLatency.REQUEST))
    assert sequence_s is not None
    assert request_s is not None
    assert request_s - sequence_s > 0.7, "the wait for its turn is no part of the sequence"
