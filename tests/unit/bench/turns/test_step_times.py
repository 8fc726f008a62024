"""The bench of the scheduler's own time: what its schedulers run. No test compares times."""

from orca.bench.figures.writer import append
from orca.bench.parts.prefixes import SHARED_TOKENS, Cache, MeasuredScheduler, StepTimePlan, figures, lines, measure

SMALL = StepTimePlan(batch_sizes=(2, 3), in_hand=8, cached_blocks=600, rounds=2, steps=60)


def test_each_scheduler_has_its_cache_and_is_full() -> None:
    found = {cache: MeasuredScheduler(SMALL, 2, cache) for cache in Cache}
    for scheduler in found.values():
        scheduler.fill()
        assert all(scheduler.step() > 0 for _ in range(200))
        assert len(scheduler.state.requests) >= SMALL.in_hand - 2
        scheduler.state.check()
    assert found[Cache.OFF].state.prefixes is None
    for cache in (Cache.NO_HITS, Cache.HITS):
        prefixes = found[cache].state.prefixes
        assert prefixes is not None
        assert prefixes.index.cached >= SMALL.cached_blocks - 80, "as many blocks as a longest request may still take"
    assert found[Cache.NO_HITS].found == found[Cache.OFF].found == 0
    assert 0 < found[Cache.HITS].found <= found[Cache.HITS].begun * SHARED_TOKENS


def test_every_size_is_measured_with_every_cache_and_shown() -> None:
    found = measure(SMALL)
    assert [(each.batch_size, each.cache) for each in found] == [(size, cache) for size in (2, 3) for cache in Cache]
    assert all(len(each.median_us) == len(each.mean_us) == SMALL.rounds for each in found)
    assert len(lines(found)) == 1 + len(found)
    records = figures(found, {"in hand": SMALL.in_hand})
    assert len({(each.what, str(each.settings)) for each in records}) == len(records) == 2 * (3 * 3 + 2)
    append(None, records, words=["test"])
