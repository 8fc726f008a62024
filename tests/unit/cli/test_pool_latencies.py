"""`orca pool latencies`: what it prints about counts."""

import json

from orca.cli.pool_latencies import latencies_json, latencies_text
from orca.pool.latency_bins import AnswerLatency, bin_of
from orca.pool.latency_counts import LatencyCounts, PeriodLatencies
from orca.pool.length_bins import PERIOD_MS

COUNTS = LatencyCounts(
    awake_ms=PERIOD_MS + 100_000,
    periods=(
        PeriodLatencies(
            period=1,
            first_ms=PERIOD_MS,
            bins={AnswerLatency.SEQUENCE: {bin_of(2e6): 98, bin_of(8e6): 2}, AnswerLatency.REQUEST: {bin_of(9e6): 100}},
        ),
    ),
)


def test_a_person_reads_percentiles_and_throughput() -> None:
    lines = latencies_text("r1", COUNTS, 1800).splitlines()
    assert lines[:2] == [
        "revision r1: 100 answers in the last 4 hours, half-life 1800 s",
        "answers per second in the last 20 minutes: 1",
    ]
    assert [line.split() for line in lines[2:]] == [
        ["seconds", "p50", "p90", "p99"],
        ["sequence", "2.02", "2.02", "8.06"],
        ["request", "9.04", "9.04", "9.04"],
        ["first", "token", "-", "-", "-"],
        ["request", "first", "token", "-", "-", "-"],
        ["token", "-", "-", "-"],
    ]


def test_json_has_the_answers_of_each_bin() -> None:
    found = json.loads(latencies_json("r1", COUNTS, 60))
    assert (found["answers"], found["answers_per_s"], found["half_life_s"]) == (100, 1.0, 60)
    assert found["seconds"]["first_token"] == {"p50": None, "p90": None, "p99": None}
    [period] = found["periods"]
    assert (period["begun_s_ago"], period["answers"]) == (100.0, 100)
    assert [count for *_, count in period["microseconds"]["sequence"]] == [98, 2]
    assert all(low <= high for low, high, _ in period["microseconds"]["sequence"])
