"""Submit: what is stored, what is refused, and what the door says."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from orca.core.domain.errors import InvalidRequest, NameTaken, NeverFits, PoolFull, QueueFull, UnknownRequest
from orca.core.domain.request import FinishReason, SamplingParams
from orca.pool.records import OnDisconnect, OwnershipState
from support.pool.beds import REVISION, SETTINGS, Bed, Scheduler, request, started, submission, with_settings


async def test_a_parent_is_stored_with_all_its_requests_in_order_of_arrival(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    first = await bed.pool.submit(submission("a", n=2))
    second = await bed.pool.submit(submission("b"))
    assert [r.arrival for r in (*first, *second)] == [1, 2, 3]
    assert abs(first[0].submitted_ms - await bed.wall_ms()) < 5000
    assert (await bed.pool.stats()).queued == 3


async def test_a_submitted_parent_reads_back_as_it_was_written(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    sampling = SamplingParams(temperature=0.7, logit_bias=((5, -1.5),), stop=("ab", "ü"), stop_token_ids=(9,), seed=7)
    sent = submission("a", n=2, on_disconnect=OnDisconnect.KEEP, sampling=sampling, deadline_ms=2**42, traceparent="t")
    sent = replace(sent, owner="someone")
    stored = await bed.pool.submit(sent)
    parent = await bed.pool.parent("a")
    assert (parent.requests, parent.on_disconnect, parent.render) == (stored, OnDisconnect.KEEP, sent.render)
    assert parent.owner == "someone"
    assert await bed.pool.conversation("a") is None
    assert stored[1].sampling == sampling


async def test_a_conversation_is_kept_with_its_parent_counted_and_forgotten(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    text = '["é, a later call may go on from this"]'
    await bed.pool.submit(submission("a"))
    plain = (await bed.pool.stats()).bytes_reserved
    await bed.pool.submit(replace(submission("b"), conversation=text))
    assert (await bed.pool.stats()).bytes_reserved - plain == plain + len(text.encode())
    assert await bed.pool.conversation("b") == text
    await bed.pool.forget("b")
    assert (await bed.pool.stats()).bytes_reserved == plain
    with pytest.raises(UnknownRequest):
        await bed.pool.conversation("b")


async def test_the_same_parent_again_gets_the_same_answer_and_stores_nothing(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    first = await bed.pool.submit(submission("a", n=3))
    reserved = (await bed.pool.stats()).bytes_reserved
    assert await bed.pool.submit(submission("a", n=3)) == first
    assert (await bed.pool.stats()).bytes_reserved == reserved


async def test_a_parent_that_was_claimed_and_ended_still_answers_its_repeated_submit(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await bed.pool.cancel("a")
    assert await bed.pool.submit(submission("a")) == (owned["a.0"].request,)
    assert (await bed.pool.status("a.0")).state is OwnershipState.ENDED


async def test_a_repeated_submit_is_answered_with_the_stored_requests_and_not_its_own(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    first = await bed.pool.submit(submission("a", sampling=SamplingParams(seed=1)))
    assert await bed.pool.submit(submission("a", sampling=SamplingParams(seed=2))) == first


async def test_each_submit_of_a_parent_brings_a_reader_that_keeps_it_alive(bed: Bed) -> None:
    await started(bed, "a")
    await bed.pool.detach("a", "reader")
    await bed.pass_awake(SETTINGS.resume_grace_ms - 1)
    await bed.pool.submit(replace(submission("a"), reader="another"))
    await bed.pass_awake(SETTINGS.reader_lease_ms)
    await bed.pool.sweep()
    assert (await bed.pool.status("a.0")).end is None
    await bed.pass_awake(SETTINGS.resume_grace_ms)
    await bed.pool.sweep()
    assert (await bed.pool.read("a.0", 0)).end.reason is FinishReason.CANCELLED


async def test_a_parent_of_another_digest_is_refused_and_gets_no_reader(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(replace(submission("a"), digest="one"))
    with pytest.raises(NameTaken):
        await bed.pool.submit(replace(submission("a"), digest="two", reader="another"))
    await bed.pool.detach("a", "reader")
    await bed.pass_awake(SETTINGS.resume_grace_ms)
    await bed.pool.sweep()
    assert (await bed.pool.status("a.0")).state is OwnershipState.ENDED


async def test_a_revision_that_is_not_the_current_one_is_refused(bed: Bed) -> None:
    with pytest.raises(InvalidRequest, match="no current one"):
        await bed.pool.submit(submission("a"))
    await bed.pool.set_revision(REVISION, 1)
    with pytest.raises(InvalidRequest, match="current one is r1"):
        await bed.pool.submit(submission("a", revision="r2"))
    assert (await bed.pool.stats()).queued == 0


async def test_more_slots_than_promised_are_refused(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    assert await bed.pool.promise_slots(REVISION, 16) == 16
    await bed.pool.submit(submission("a", max_new_tokens=12))
    with pytest.raises(NeverFits, match=r"17 slots, the engine has 16"):
        await bed.pool.submit(submission("b", max_new_tokens=13))


async def test_the_first_promise_is_kept_and_ends_requests_that_can_never_run(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("big", max_new_tokens=100))
    await bed.pool.submit(submission("small"))
    assert await bed.pool.promise_slots(REVISION, 64) == 64
    assert await bed.pool.promise_slots(REVISION, 1000) == 64
    assert (await bed.pool.read("big.0", 0)).end.reason is FinishReason.REFUSED
    assert (await bed.pool.status("small.0")).state is OwnershipState.QUEUED


async def test_a_full_queue_refuses_the_whole_parent(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(with_settings(max_queued=3))
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a", n=2))
    with pytest.raises(QueueFull):
        await bed.pool.submit(submission("b", n=2))
    with pytest.raises(UnknownRequest):
        await bed.pool.parent("b")
    await bed.pool.submit(submission("c", n=1))


async def test_a_queue_full_of_prompt_tokens_refuses_the_whole_parent(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(with_settings(max_queued_prompt_tokens=11))
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a", n=2))
    with pytest.raises(QueueFull, match="requests with 11 prompt tokens may wait"):
        await bed.pool.submit(submission("b"))
    await bed.pool.cancel("a")
    # What is larger than the bound waits alone.
    await bed.pool.submit(submission("c", n=3))
    assert (await bed.pool.stats()).queued_prompt_tokens == 12


async def test_the_queue_bound_counts_waiting_requests_only(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(with_settings(max_queued=1))
    scheduler, _ = await started(bed, "a")
    await bed.pool.submit(submission("b"))
    with pytest.raises(QueueFull):
        await bed.pool.submit(submission("c"))
    # What was accepted comes back into a queue that is full.
    await bed.pool.leave(scheduler.caller)
    assert (await bed.pool.stats()).queued == 2


async def test_bytes_are_reserved_until_the_bound_and_given_back(make_bed: Callable[..., Bed]) -> None:
    probe = make_bed()
    await probe.pool.set_revision(REVISION, 1)
    await probe.pool.submit(submission("a", max_new_tokens=1000))
    one = (await probe.pool.stats()).bytes_reserved

    bed = make_bed(with_settings(bytes_max=2 * one - 1))
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("a", max_new_tokens=1000))
    with pytest.raises(PoolFull):
        await bed.pool.submit(submission("b", max_new_tokens=1000))
    await bed.pool.cancel("a")
    await bed.pool.submit(submission("b", max_new_tokens=1000))


async def test_asking_for_logprobs_reserves_more_bytes(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    sizes = [0]
    for parent, sampling in (
        ("a", SamplingParams()),
        ("b", SamplingParams(logprobs=5)),
        ("c", SamplingParams(logprobs=5, prompt_logprobs=20)),
    ):
        await bed.pool.submit(submission(parent, sampling=sampling))
        sizes.append((await bed.pool.stats()).bytes_reserved)
    one, two, three = (after - before for before, after in pairwise(sizes))
    assert two - one >= 12 * (16 + 5 * 12)
    assert three - two >= 3 * (16 + 20 * 12)


async def test_unknown_ids_are_reported_as_unknown(bed: Bed) -> None:
    for call in (bed.pool.parent("x"), bed.pool.read("x.0", 0), bed.pool.status("x.0"), bed.pool.attach("x", "r")):
        with pytest.raises(UnknownRequest):
            await call
    await bed.pool.cancel("x")
    await bed.pool.detach("x", "r")
    await bed.pool.renew([("x", "r")])
    assert await bed.pool.read_many({"x.0": 0}) == {"x.0": None}


async def test_an_invalid_submission_is_an_assertion(bed: Bed) -> None:
    broken = submission("a")
    with pytest.raises(AssertionError, match="numbered from 0"):
        await bed.pool.submit(type(broken)(parent="a", requests=(request("a", 1),), reader="r"))


async def test_a_new_revision_takes_over_once_a_group_of_it_has_formed(bed: Bed) -> None:
    assert await bed.pool.set_revision(REVISION, 1) == REVISION
    assert await bed.pool.set_revision("r2", 2) == REVISION
    await bed.pool.promise_slots("r2", 100)
    assert await bed.pool.set_revision("r2", 2) == "r2"
    assert await bed.pool.set_revision(REVISION, 1) == "r2"
    assert (await bed.pool.stats()).revision == "r2"


async def test_requests_are_pinned_to_the_revision_they_were_accepted_under(bed: Bed) -> None:
    await bed.pool.set_revision(REVISION, 1)
    await bed.pool.submit(submission("old"))
    await bed.pool.promise_slots("r2", 100)
    await bed.pool.set_revision("r2", 2)
    await bed.pool.submit(submission("new", revision="r2"))
    old, new = Scheduler(bed, "p1", "g1", REVISION), Scheduler(bed, "p2", "g2", "r2")
    await old.enter()
    await new.enter()
    assert (list(await old.take()), list(await new.take())) == (["old.0"], ["new.0"])


async def test_stats_count_ended_requests_also_after_they_are_forgotten(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(with_settings(retention_ms=1, retention_least_ms=1))
    await started(bed, "a", "b")
    await bed.pool.cancel("a")
    await bed.pool.cancel("a")
    await bed.freeze(100)
    await bed.pool.sweep()
    stats = await bed.pool.stats()
    assert (stats.ended_ever, stats.owned) == (1, 1)


async def test_stats_have_the_bounds_of_admission(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed(with_settings(max_queued=7, max_queued_prompt_tokens=8))
    stats = await bed.pool.stats()
    assert (stats.queued_max, stats.queued_prompt_tokens_max) == (7, 8)


async def test_stats_count_by_state_and_have_the_oldest_wait(bed: Bed) -> None:
    _, owned = await started(bed, "a", "b")
    await bed.pool.submit(submission("c", n=2))
    await bed.pool.cancel("a")
    await bed.freeze(400)
    stats = await bed.pool.stats()
    assert (stats.queued, stats.owned, stats.ended) == (2, 1, 1)
    assert (stats.queued_prompt_tokens, stats.groups, stats.promised_slots) == (8, ("g1",), None)
    assert len(owned) == 2
    assert 0 <= stats.oldest_wait_ms < 60_000


async def test_stats_have_the_time_of_the_pool(bed: Bed) -> None:
    before_ms = await bed.wall_ms()
    stats = await bed.pool.stats()
    assert before_ms <= stats.wall_ms <= await bed.wall_ms()
