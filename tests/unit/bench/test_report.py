"""The figures of a run, against numbers worked out by hand."""

import pytest

from orca.bench.report import lines
from orca.planner.simulate.outcomes import RequestOutcome, percentile, spread, summarise


def outcome(index: int, arrival_s: float, *token_s: float, error: str | None = None) -> RequestOutcome:
    return RequestOutcome(
        index=index,
        prompt_tokens=10,
        new_tokens=len(token_s),
        arrival_s=arrival_s,
        sent_s=arrival_s,
        token_s=token_s,
        end_s=token_s[-1] if token_s else arrival_s,
        error=error,
    )


RUN = [
    outcome(0, 1.0, 1.5, 1.6, 1.8, 3.0),  # latency 2.0 over 4 tokens
    outcome(1, 2.0, 5.0),  # latency 3.0 over 1 token
    outcome(2, 4.0, 4.1, 6.0),  # latency 2.0 over 2 tokens
    outcome(3, 4.0, error="HTTP 429: full"),
]


def test_throughput_counts_from_the_first_arrival_to_the_last_end() -> None:
    report = summarise(RUN)
    assert report.duration_s == 5.0
    assert report.requests_per_s == pytest.approx(3 / 5)
    assert report.tokens_per_s == pytest.approx(7 / 5)
    assert report.prompt_tokens_per_s == pytest.approx(30 / 5)


def test_latencies_are_those_of_the_requests_that_succeeded() -> None:
    report = summarise(RUN)
    assert report.ttft_s is not None
    assert report.inter_token_s is not None
    assert report.latency_s is not None
    assert report.normalised_s is not None
    assert report.ttft_s.p50 == pytest.approx(0.5)
    assert report.inter_token_s.mean == pytest.approx((0.1 + 0.2 + 1.2 + 1.9) / 4)
    assert report.latency_s.max == 3.0
    assert report.normalised_s.p50 == pytest.approx(1.0)  # of 0.5, 3.0 and 1.0


def test_latency_counts_from_the_arrival_even_if_the_client_sent_late() -> None:
    late = RequestOutcome(index=0, prompt_tokens=1, new_tokens=1, arrival_s=1.0, sent_s=3.0, token_s=(4.0,), end_s=4.0)
    report = summarise([late])
    assert report.latency_s is not None
    assert report.latency_s.p50 == 3.0
    assert report.client_lag_s == 2.0
    assert any("2.00 s late" in line for line in lines(report))


def test_errors_are_counted_by_reason_and_shown() -> None:
    report = summarise(RUN)
    assert report.errors == {"HTTP 429: full": 1}
    assert "1 failed: HTTP 429: full" in lines(report)


def test_a_run_in_which_all_requests_fail_has_no_latencies() -> None:
    report = summarise([outcome(0, 0.0, error="connection: refused")])
    assert (report.requests, report.tokens_per_s, report.ttft_s, report.normalised_s) == (0, 0.0, None, None)
    assert lines(report)[0].endswith("1 failed")


def test_percentiles_are_interpolated_between_neighbours() -> None:
    values = [float(value) for value in range(101)]
    assert percentile(values, 0.99) == pytest.approx(99.0)
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([4.0], 0.9) == 4.0


def test_no_values_have_no_spread() -> None:
    assert spread([]) is None


def test_the_table_shows_milliseconds() -> None:
    row = next(line for line in lines(summarise(RUN)) if line.startswith("end to end / token"))
    assert "1000.0" in row
