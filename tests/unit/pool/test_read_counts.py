"""Counts as Redis has them: what cannot be a count is refused, since others may write to the same Redis."""

import pytest

from orca.core.domain.errors import PoolUnavailable
from orca.pool.latency_bins import BIN_MAX, AnswerLatency
from orca.pool.length_bins import COUNT_MAX
from orca.pool.redis.script_format import read_deadline_counts, read_latencies, read_lengths


def test_counts_are_read() -> None:
    latencies = read_latencies(3, [b"first_ms", b"7", b"0,5", b"2", b"4,%d" % BIN_MAX, b"%d" % COUNT_MAX])
    assert latencies.bins == {AnswerLatency.SEQUENCE: {5: 2}, AnswerLatency.TOKEN: {BIN_MAX: COUNT_MAX}}
    lengths = read_lengths(3, 0, [b"cut", b"1", b"8,9", b"3"])
    assert (lengths.cells, lengths.cut) == ({(8, 9): 3}, 1)


@pytest.mark.parametrize(
    "fields",
    [
        [b"0,5", b"2"],
        [b"first_ms", b"7", b"5,5", b"2"],
        [b"first_ms", b"7", b"0,%d" % (BIN_MAX + 1), b"2"],
        [b"first_ms", b"7", b"0,99999999999", b"2"],
        [b"first_ms", b"7", b"0,-1", b"2"],
        [b"first_ms", b"7", b"0", b"2"],
        [b"first_ms", b"7", b"0,5", b"%d" % (COUNT_MAX + 1)],
        [b"first_ms", b"7", b"0,5", b"-1"],
        [b"first_ms", b"x"],
        [b"first_ms"],
        [b"\xff", b"1"],
    ],
)
def test_latencies_that_cannot_be_are_refused(fields: list[bytes]) -> None:
    with pytest.raises(PoolUnavailable, match=r"what the pool has counted in period 3 cannot be read: "):
        read_latencies(3, fields)


@pytest.mark.parametrize(
    "fields", [[b"8,9", b"-3"], [b"8", b"3"], [b"8,99999999", b"3"], [b"-8,9", b"3"], [b"8,9", b"x"], [b"cut"]]
)
def test_lengths_that_cannot_be_are_refused(fields: list[bytes]) -> None:
    with pytest.raises(PoolUnavailable, match=r"what the pool has counted in period 3 cannot be read: "):
        read_lengths(3, 0, fields)


def test_counts_of_deadlines_are_read() -> None:
    found = read_deadline_counts(7, 3, b"2", b"1", 1, b"0", b"4")
    assert [(each.period, each.in_time, each.late) for each in found.periods] == [(3, 2, 1), (1, 0, 4)]
    assert (found.awake_ms, read_deadline_counts(7).periods) == (7, ())


@pytest.mark.parametrize("count", [b"-1", b"x", b"1.5", b"%d" % (COUNT_MAX + 1)])
def test_counts_of_deadlines_that_cannot_be_are_refused(count: bytes) -> None:
    with pytest.raises(PoolUnavailable, match=r"what the pool has counted in period 3 cannot be read: "):
        read_deadline_counts(7, 3, b"2", count)
