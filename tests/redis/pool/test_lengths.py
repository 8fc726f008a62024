"""Lengths: the pool counts each answer that ends by itself once, by its period and by the bins of its lengths."""

import math
import random
from collections import Counter, defaultdict

import pytest

from orca.core.domain.request import End, FinishReason
from orca.pool.length_bins import PERIOD_MS, PERIODS_KEPT, bin_of, lua
from orca.pool.records import Cell, Claimed, CommitAnswer, CommitEntry, OnDisconnect
from support.pool.beds import (
    REVISION,
    SETTINGS,
    UNREAD_MS,
    Bed,
    RedisBed,
    Scheduler,
    entry,
    started,
    submission,
)

WITH_COLON = "r:1"  # a name that could be taken for a revision and a period


async def cells(bed: Bed, revision: str = REVISION) -> dict[Cell, int]:
    """All that is counted of a revision, over its periods."""
    counts: Counter[Cell] = Counter()
    for period in (await bed.pool.lengths(revision)).periods:
        counts.update(period.cells)
    return dict(counts)


async def finish(bed: Bed, claimed: Claimed, tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
    """Commit all that a request still lacks to `tokens` in one entry."""
    start = len(claimed.log)
    assert await bed.pool.commit([entry(claimed, start, *range(start, tokens), end=reason)]) == [bed.applied]


async def test_answers_are_counted_by_the_bins_of_prompt_and_output(bed: Bed) -> None:
    assert (await bed.pool.lengths(REVISION)).periods == ()
    _, owned = await started(bed, "a", "b", "c", prompt=(1,) * 33, max_new_tokens=100)
    await finish(bed, owned["a.0"], 40)
    await finish(bed, owned["b.0"], 41, FinishReason.LENGTH)
    await finish(bed, owned["c.0"], 3)
    counts = await bed.pool.lengths(REVISION)
    [period] = counts.periods
    assert bin_of(40) == bin_of(41)
    assert period.cells == {(bin_of(33), bin_of(40)): 2, (bin_of(33), 3): 1}
    assert (counts.answers, period.cut, counts.cut_share) == (3, 1, 1 / 3)
    assert period.age_ms < PERIOD_MS / 2
    assert (await bed.pool.lengths("r2")).answers == 0


async def test_a_repeated_commit_counts_once(bed: Bed) -> None:
    _, owned = await started(bed, "a")
    last = [entry(owned["a.0"], 0, 5, 6, end=FinishReason.LENGTH)]
    await bed.pool.commit(last)
    assert await bed.pool.commit(last) == [CommitAnswer.ALREADY_THERE]
    other = [entry(owned["a.0"], 0, 5, end=FinishReason.STOP)]
    assert await bed.pool.commit(other) == [CommitAnswer.ENDED]
    [period] = (await bed.pool.lengths(REVISION)).periods
    assert (period.cells, period.cut) == ({(4, 2): 1}, 1)


async def test_an_answer_under_two_claims_counts_once_with_its_whole_log(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a")
    await bed.pool.commit([entry(owned["a.0"], 0, 5, 6, 7)])
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    again = (await scheduler.take())["a.0"]
    late = [entry(owned["a.0"], 3, 8, end=FinishReason.STOP)]
    assert await bed.pool.commit(late) == [CommitAnswer.NOT_YOURS]
    await finish(bed, again, 5)
    assert await cells(bed) == {(4, 5): 1}


@pytest.mark.parametrize("tokens", [0, 3])
async def test_an_end_without_a_token_of_its_own_counts_the_log_before_it(bed: Bed, tokens: int) -> None:
    """A log may be whole when its request is claimed again, and a stop may come before any token."""
    scheduler, owned = await started(bed, "a")
    if tokens:
        await bed.pool.commit([entry(owned["a.0"], 0, *range(tokens))])
    await bed.pool.give_back({"a.0": owned["a.0"].claim})
    await finish(bed, (await scheduler.take())["a.0"], tokens)
    assert await cells(bed) == {(4, tokens): 1}


async def test_each_choice_is_an_answer_of_its_own(bed: Bed) -> None:
    _, owned = await started(bed, "a", n=3)
    for claimed, tokens in zip(owned.values(), (1, 2, 2), strict=True):
        await finish(bed, claimed, tokens)
    assert await cells(bed) == {(4, 1): 1, (4, 2): 2}


async def test_a_source_is_the_prompt_and_a_decoder_prefix_does_not_count(bed: Bed) -> None:
    _, owned = await started(bed, "a", prompt=(1,) * 9, decoder_prefix=(0, 7))
    await finish(bed, owned["a.0"], 2)
    assert await cells(bed) == {(9, 2): 1}


async def test_other_ends_are_not_counted(bed: Bed) -> None:
    scheduler, owned = await started(bed, "cancelled", "refused", "failed", "late", deadline_ms=60_000)
    await bed.pool.cancel("cancelled")
    ends = {"refused": End(FinishReason.REFUSED, 1, detail="no"), "failed": End(FinishReason.ERROR, 1)}
    await bed.pool.commit([entry(owned[f"{name}.0"], 0, 5) for name in ends])
    for name, end in ends.items():
        one = CommitEntry(request_id=f"{name}.0", claim=owned[f"{name}.0"].claim, index=1, end=end)
        assert await bed.pool.commit([one]) == [bed.applied]
    await bed.pass_deadlines(60_001)
    await bed.pool.sweep()
    assert await scheduler.heartbeat() == {}
    assert (await bed.pool.stats()).ended == 4
    assert await cells(bed) == {}


async def test_counts_outlive_their_requests(bed: Bed) -> None:
    _, owned = await started(bed, "a", "b", on_disconnect=OnDisconnect.KEEP)
    for claimed in owned.values():
        await finish(bed, claimed, 2)
    await bed.pool.forget("a")
    await bed.pass_awake(SETTINGS.retention_ms + UNREAD_MS)
    await bed.pool.sweep()
    assert (await bed.pool.stats()).ended == 0
    assert await cells(bed) == {(4, 2): 2}


async def test_periods_grow_old_one_by_one_and_go_after_four_hours(bed: Bed) -> None:
    scheduler, owned = await started(bed, "a", on_disconnect=OnDisconnect.KEEP)
    await finish(bed, owned["a.0"], 1)
    await bed.pass_awake(3 * PERIOD_MS)
    await bed.pool.submit(submission("b"))
    await scheduler.heartbeat()
    await finish(bed, (await scheduler.take())["b.0"], 2)
    new, old = (await bed.pool.lengths(REVISION)).periods
    assert (new.cells, old.cells) == ({(4, 2): 1}, {(4, 1): 1})
    assert new.age_ms < old.age_ms == pytest.approx(2.5 * PERIOD_MS, abs=PERIOD_MS / 4)
    await bed.pass_awake((PERIODS_KEPT - 3) * PERIOD_MS)
    await bed.pool.sweep()
    assert await cells(bed) == {(4, 2): 1}
    await bed.pass_awake(3 * PERIOD_MS)
    await bed.pool.sweep()
    assert await cells(bed) == {}


async def test_revisions_are_counted_apart_and_a_colon_in_their_names_is_no_period(bed: Bed) -> None:
    for generation, revision in enumerate(("r", WITH_COLON), start=1):
        await bed.pool.promise_slots(revision, 1000)
        await bed.pool.set_revision(revision, generation)
        await bed.pool.submit(submission(revision, revision=revision))
        scheduler = Scheduler(bed, process=f"p{generation}", group=f"g{generation}", revision=revision)
        await scheduler.enter()
        await finish(bed, (await scheduler.take())[f"{revision}.0"], generation)
    assert await cells(bed, "r") == {(4, 1): 1}
    assert await cells(bed, WITH_COLON) == {(4, 2): 1}


async def test_a_period_that_is_over_leaves_no_key(redis_bed: RedisBed) -> None:
    _, owned = await started(redis_bed, "a", on_disconnect=OnDisconnect.KEEP)
    await finish(redis_bed, owned["a.0"], 1)
    keys = [redis_bed.keys.named(kind, f"{REVISION}:0") for kind in ("lengths", "latencies")]
    assert await redis_bed.redis.exists(*keys) == 2
    await redis_bed.pass_awake((PERIODS_KEPT - 1) * PERIOD_MS)
    await redis_bed.pool.sweep()
    assert await redis_bed.redis.exists(*keys) == 2
    await redis_bed.pass_awake(PERIOD_MS)
    await redis_bed.pool.sweep()
    assert not await redis_bed.redis.exists(*keys, redis_bed.keys.single("periods"))


async def test_full_memory_reads_the_counts(redis_bed: RedisBed) -> None:
    _, owned = await started(redis_bed, "a")
    await finish(redis_bed, owned["a.0"], 1)
    before = await redis_bed.redis.hgetall(redis_bed.keys.single("meta"))
    assert await cells(redis_bed) == {(4, 1): 1}
    assert await redis_bed.redis.hgetall(redis_bed.keys.single("meta")) == before, "reading writes nothing"


async def test_the_scripts_have_the_same_bins(redis_bed: RedisBed) -> None:
    powers = [2**bits + change for bits in range(32) for change in (-1, 0, 1)]
    drawn = random.Random(7)
    lengths = [*range(2000), *powers, *(drawn.randrange(2 ** drawn.randrange(1, 32)) for _ in range(3000))]
    script = (
        f"{lua()} local bins = {{}} for i, tokens in ipairs(ARGV) do bins[i] = bin_of(tonumber(tokens)) end return bins"
    )
    assert await redis_bed.redis.eval(script, 0, *lengths) == [bin_of(tokens) for tokens in lengths]


class Walk:
    """Calls drawn by a seed, and what they must leave."""

    def __init__(self, bed: Bed, seed: int) -> None:
        self.bed = bed
        self.random = random.Random(seed)
        self.scheduler = Scheduler(bed)
        self.owned: dict[str, Claimed] = {}
        self.logs: Counter[str] = Counter()
        self.period = 0
        self.expected: defaultdict[int, Counter[Cell]] = defaultdict(Counter)
        self.cut: Counter[int] = Counter()
        self.ended: list[CommitEntry] = []

    async def run(self, steps: int) -> None:
        await self.bed.pool.set_revision(REVISION, 1)
        await self.scheduler.enter()
        often = self.submit, self.grow, self.end
        moves = *often, *often, self.repeat, self.cancel, self.again, self.time
        for number in range(steps):
            await self.random.choice(moves)(f"s{number}")

    async def submit(self, name: str) -> None:
        prompt = (1,) * self.random.choice((1, 15, 16, 17, 40))
        kept = submission(name, n=self.random.choice((1, 1, 3)), prompt=prompt, on_disconnect=OnDisconnect.KEEP)
        await self.bed.pool.submit(kept)
        await self.take()

    async def take(self) -> None:
        await self.scheduler.heartbeat()
        self.owned |= await self.scheduler.take()

    def draw(self) -> Claimed | None:
        return self.owned[self.random.choice(sorted(self.owned))] if self.owned else None

    async def grow(self, _: str) -> None:
        if claimed := self.draw():
            name = claimed.request.id
            assert await self.bed.pool.commit([entry(claimed, self.logs[name], 7)]) == [self.bed.applied]
            self.logs[name] += 1

    async def end(self, _: str) -> None:
        if claimed := self.draw():
            name = claimed.request.id
            reason = self.random.choice((FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR))
            last = entry(claimed, self.logs[name], *[7] * self.random.choice((0, 1, 30)), end=reason)
            assert await self.bed.pool.commit([last]) == [self.bed.applied]
            assert last.end is not None
            if reason is not FinishReason.ERROR:
                self.expected[self.period][bin_of(len(claimed.request.prompt)), bin_of(last.end.count)] += 1
                self.cut[self.period] += reason is FinishReason.LENGTH
            del self.owned[name]
            self.ended.append(last)

    async def repeat(self, _: str) -> None:
        if self.ended:
            answer = await self.bed.pool.commit([self.random.choice(self.ended)])
            assert answer in ([CommitAnswer.ALREADY_THERE], [CommitAnswer.NOT_YOURS])

    async def cancel(self, _: str) -> None:
        if claimed := self.draw():
            parent = claimed.request.parent
            await getattr(self.bed.pool, self.random.choice(("cancel", "forget")))(parent)
            self.owned = {name: one for name, one in self.owned.items() if one.request.parent != parent}

    async def again(self, _: str) -> None:
        await self.bed.pool.give_back({name: one.claim for name, one in self.owned.items()})
        self.owned.clear()
        await self.take()

    async def time(self, _: str) -> None:
        # Whole periods: what really passes beside them is far less than half a period.
        periods = self.random.choice((1, 1, 2, 5))
        await self.bed.pass_awake(periods * PERIOD_MS)
        self.period += periods
        await self.bed.pool.sweep()
        await self.again("")


@pytest.mark.parametrize("seed", range(4))
async def test_a_walk_counts_each_answer_in_its_period(bed: Bed, seed: int) -> None:
    walk = Walk(bed, seed)
    await walk.run(150)
    found = {
        walk.period - math.ceil(period.age_ms / PERIOD_MS): (dict(period.cells), period.cut)
        for period in (await bed.pool.lengths(REVISION)).periods
    }
    assert found == {
        period: (dict(cells), walk.cut[period])
        for period, cells in walk.expected.items()
        if period > walk.period - PERIODS_KEPT
    }
    assert len(found) > 2, "the walk has answers in several periods"
