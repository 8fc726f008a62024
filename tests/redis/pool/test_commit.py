"""Commit, cancel and read: what enters a log, in which order, and who sees what."""

import pytest

from orca.core.domain.request import End, FinishReason, Logprob, SamplingParams, Token
from orca.core.domain.step import Claim
from orca.pool.records import CommitAnswer, CommitEntry, LogSlice, OwnershipState
from support.pool.beds import Bed, entry, started, submission


async def test_tokens_and_end_enter_the_log_in_order(bed: Bed) -> None:
    _, owned = await started(bed, "a", "b")
    a, b = owned["a.0"], owned["b.0"]
    assert await bed.pool.commit([entry(a, 0, 5), entry(b, 0, 6)]) == [bed.applied] * 2
    assert await bed.pool.commit([entry(a, 1, 7), entry(b, 1, 8, end=FinishReason.STOP)]) == [bed.applied] * 2
    assert [token.id for token in (await bed.pool.read("a.0", 0)).tokens] == [5, 7]
    log = await bed.pool.read("b.0", 0)
    assert ([token.id for token in log.tokens], log.end) == ([6, 8], End(FinishReason.STOP, 2))


async def test_each_entry_of_a_log_has_the_claim_that_wrote_it(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", "b")
    await bed.pool.commit([entry(owned["a.0"], 0, 5, 6)])
    await scheduler.enter()
    again = (await scheduler.take())["a.0"]
    await bed.pool.commit([entry(owned["a.0"], 2, 8)])
    await bed.pool.commit([entry(again, 2, 7, end=FinishReason.STOP)])
    first, second = owned["a.0"].claim.number, again.claim.number
    assert await bed.writers("a.0") == [first, first, second, second]


async def test_an_end_that_the_pool_decides_has_the_claim_number_of_that_time(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    await bed.pool.cancel("a")
    number = owned["a.0"].claim.number
    assert await bed.writers("a.0") == [number, number + 1]


async def test_the_last_token_and_the_end_are_one_write(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a")
    await bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.LENGTH)])
    status = await bed.pool.status("a.0")
    assert (status.state, status.owner, status.claim) == (OwnershipState.ENDED, None, None)
    assert (status.tokens, status.end) == (1, End(FinishReason.LENGTH, 1))
    assert await scheduler.heartbeat() == {}


async def test_an_end_may_come_without_a_token(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    assert await bed.pool.commit([entry(owned["a.0"], 0, end=FinishReason.STOP)]) == [bed.applied]
    assert await bed.pool.commit([entry(owned["a.0"], 0, end=FinishReason.STOP)]) == [CommitAnswer.ALREADY_THERE]
    assert (await bed.pool.read("a.0", 0)).end == End(FinishReason.STOP, 0)


async def test_a_refused_request_ends_with_its_reason_after_the_tokens_that_it_has(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", "b")
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    end = End(FinishReason.REFUSED, 1, detail="token 7 is not allowed: “x”")
    refused = CommitEntry(request_id="a.0", claim=owned["a.0"].claim, index=1, end=end)
    assert await bed.pool.commit([refused, entry(owned["b.0"], 0, 6)]) == [bed.applied] * 2
    assert await bed.pool.commit([refused]) == [CommitAnswer.ALREADY_THERE]
    assert await bed.pool.read("a.0", 0) == LogSlice(0, (Token(5),), end)
    assert (await bed.pool.status("a.0")).end == end
    assert set(await scheduler.heartbeat()) == {"b.0"}, "the other request of the same step goes on"


async def test_the_pool_keeps_when_the_first_token_and_the_end_came(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    status = await bed.pool.status("a.0")
    assert (status.first_token_ms, status.ended_ms) == (None, None)
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    first = (await bed.pool.status("a.0")).first_token_ms
    await bed.freeze(1000)
    await bed.pool.commit([entry(owned["a.0"], 1, 6)])
    await bed.pool.commit([entry(owned["a.0"], 2, 7, end=FinishReason.STOP)])
    status = await bed.pool.status("a.0")
    assert status.first_token_ms == first
    assert status.request.submitted_ms <= first <= status.ended_ms <= await bed.wall_ms()


async def test_an_end_before_the_first_token_has_only_its_own_time(bed: Bed) -> None:
    await started(bed, "a")
    await bed.pool.cancel("a")
    status = await bed.pool.status("a.0")
    assert status.first_token_ms is None
    assert status.request.submitted_ms <= status.ended_ms <= await bed.wall_ms()


async def test_a_repeated_entry_is_reported_as_already_there(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    step = [entry(owned["a.0"], 0, 5, 6)]
    await bed.pool.commit(step)
    assert await bed.pool.commit(step) == [CommitAnswer.ALREADY_THERE]
    last = [entry(owned["a.0"], 2, 7, end=FinishReason.STOP)]
    await bed.pool.commit(last)
    assert await bed.pool.commit(last) == [CommitAnswer.ALREADY_THERE]
    assert [token.id for token in (await bed.pool.read("a.0", 0)).tokens] == [5, 6, 7]


@pytest.mark.parametrize(
    ("index", "tokens", "end"),
    [
        pytest.param(2, (9,), None, id="gap"),
        pytest.param(0, (9,), None, id="other value"),
        pytest.param(0, (5, 6), None, id="overlap"),
        pytest.param(0, (5,), FinishReason.STOP, id="end of the past"),
    ],
)
async def test_an_entry_that_disagrees_with_the_log_costs_the_claim(
    bed: Bed, index: int, tokens: tuple[int, ...], end: FinishReason | None
) -> None:
    _, owned = await started(bed, "a")
    await bed.pool.commit([entry(owned["a.0"], 0, 5)])
    wrong, later = entry(owned["a.0"], index, *tokens, end=end), entry(owned["a.0"], 1, 6)
    assert await bed.pool.commit([wrong, later]) == [CommitAnswer.NOT_YOURS] * 2
    assert (await bed.pool.status("a.0")).state is OwnershipState.QUEUED
    assert [token.id for token in (await bed.pool.read("a.0", 0)).tokens] == [5]


async def test_one_refusal_does_not_touch_the_other_entries(bed: Bed) -> None:
    _, owned = await started(bed, "a", "b", "c")
    await bed.pool.cancel("b")
    unknown = CommitEntry(request_id="x.0", claim=Claim(1, "p1/2"), index=0, tokens=(Token(1),))
    answers = await bed.pool.commit([unknown, *(entry(owned[f"{name}.0"], 0, 5) for name in "abc")])
    assert answers == [CommitAnswer.NOT_YOURS, bed.applied, CommitAnswer.ENDED, bed.applied]


async def test_number_and_call_of_a_claim_are_both_compared(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    right = owned["a.0"].claim
    for wrong in (Claim(right.number, "p1/99"), Claim(right.number + 1, right.call), Claim(0, "")):
        other = CommitEntry(request_id="a.0", claim=wrong, index=0, tokens=(Token(1),))
        assert await bed.pool.commit([other]) == [CommitAnswer.NOT_YOURS]
    assert await bed.pool.commit([entry(owned["a.0"], 0, 5)]) == [bed.applied]


async def test_a_queued_request_takes_no_commit_even_with_an_empty_claim(bed: Bed) -> None:
    await started(bed)
    await bed.pool.submit(submission("a"))
    nobody = CommitEntry(request_id="a.0", claim=Claim(0, ""), index=0, tokens=(Token(1),))
    assert await bed.pool.commit([nobody]) == [CommitAnswer.NOT_YOURS]


async def test_nothing_follows_an_end(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await bed.pool.cancel("a")
    for late in (entry(owned["a.0"], 0, 5), entry(owned["a.0"], 0, end=FinishReason.STOP), entry(owned["a.0"], 1, 5)):
        assert await bed.pool.commit([late]) == [CommitAnswer.ENDED]
    assert (await bed.pool.read("a.0", 0)).end == End(FinishReason.CANCELLED, 0)


async def test_cancel_ends_every_request_that_has_not_ended(bed: Bed) -> None:
    _, owned = await started(bed, "a", n=2)
    await bed.pool.commit([entry(owned["a.0"], 0, 5, end=FinishReason.STOP)])
    await bed.pool.submit(submission("b"))
    await bed.pool.cancel("a")
    await bed.pool.cancel("b")
    reasons = [(await bed.pool.read(name, 0)).end.reason for name in ("a.0", "a.1", "b.0")]
    assert reasons == [FinishReason.STOP, FinishReason.CANCELLED, FinishReason.CANCELLED]
    stats = await bed.pool.stats()
    assert (stats.queued, stats.owned, stats.ended) == (0, 0, 3)


async def test_an_end_releases_the_unused_reserved_bytes(bed: Bed) -> None:
    _, owned = await started(bed, "a", max_new_tokens=1000)
    before = (await bed.pool.stats()).bytes_reserved
    await bed.pool.commit([entry(owned["a.0"], 0, *range(10), end=FinishReason.STOP)])
    after = (await bed.pool.stats()).bytes_reserved
    per_token = (before - after) // 990
    assert before - after == 990 * per_token
    assert per_token >= 16


async def test_a_log_is_read_from_an_index_in_bounded_pieces(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    await bed.pool.commit([entry(owned["a.0"], 0, 10, 11, 12, 13, end=FinishReason.STOP)])
    piece = await bed.pool.read("a.0", 1, limit=2)
    assert ([token.id for token in piece.tokens], piece.start, piece.end) == ([11, 12], 1, None)
    assert piece.is_cut
    rest = await bed.pool.read("a.0", 3, limit=2)
    assert ([token.id for token in rest.tokens], rest.end) == ([13], End(FinishReason.STOP, 4))
    assert not rest.is_cut
    # The end is there only behind all the tokens that it counts, also when a piece ends exactly at the last one.
    assert (await bed.pool.read("a.0", 2, limit=2)).end == End(FinishReason.STOP, 4)
    assert (await bed.pool.read("a.0", 4)).end == End(FinishReason.STOP, 4)
    assert (await bed.pool.read("a.0", 5)).end is None


async def test_many_logs_are_read_at_once_and_unchanged_ones_left_out(bed: Bed) -> None:
    _, owned = await started(bed, "a", "b", "c")
    await bed.pool.commit([entry(owned["a.0"], 0, 5), entry(owned["b.0"], 0, 6)])
    await bed.pool.cancel("c")
    slices = await bed.pool.read_many({"a.0": 0, "b.0": 1, "c.0": 0, "x.0": 0})
    assert sorted(slices) == ["a.0", "c.0", "x.0"]
    assert slices["c.0"] == LogSlice(0, (), End(FinishReason.CANCELLED, 0))
    assert slices["x.0"] is None
    assert await bed.pool.read_many({}) == {}


async def test_logprobs_come_back_exactly(bed: Bed) -> None:
    _, owned = await started(bed, "a", sampling=SamplingParams(logprobs=2, prompt_logprobs=1))
    own = Logprob(7, -0.1234567890123, ((7, -0.1234567890123), (9, float("-inf"))))
    tokens = (Token(7, own, (Logprob(2, -1.0, ((3, -0.5),)), Logprob(3, -2.0))), Token(8, Logprob(8, -3.5)))
    step = CommitEntry(
        request_id="a.0", claim=owned["a.0"].claim, index=0, tokens=tokens, end=End(FinishReason.STOP, 2, "the\nend")
    )
    await bed.pool.commit([step])
    assert await bed.pool.commit([step]) == [CommitAnswer.ALREADY_THERE]
    log = await bed.pool.read("a.0", 0)
    assert (log.tokens, log.end) == (tokens, step.end)


@pytest.mark.parametrize("stop", [None, "stop text", 50256])
async def test_what_stopped_a_request_is_kept(bed: Bed, stop: str | int | None) -> None:
    _, owned = await started(bed, "a")
    end = End(FinishReason.STOP, 1, stop)
    await bed.pool.commit(
        [CommitEntry(request_id="a.0", claim=owned["a.0"].claim, index=0, tokens=(Token(5),), end=end)]
    )
    assert (await bed.pool.status("a.0")).end == end


async def test_an_empty_entry_is_the_callers_mistake(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    with pytest.raises(AssertionError, match="tokens or an end"):
        await bed.pool.commit([entry(owned["a.0"], 0)])
    assert await bed.pool.commit([]) == []
