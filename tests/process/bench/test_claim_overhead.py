"""`orca bench deadlines --overhead`: the real scheduler on a real Redis, and the claims in the slow log."""

import pytest

from orca.bench import main as bench


@pytest.mark.parametrize("order", ["arrival", "deadline"])
def test_claims_of_each_order_are_found_in_the_slow_log(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "deadlines --overhead --rates 100 --seconds 2 --max-batch-size 4 --step-us 2000 --token-us 0 --context-ns 0"
    assert bench.main([*words.split(), "--orders", order]) == 0
    [line] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("100")]
    rate, name, waiting, steps, step_ms, claims, claim_us, share = line
    assert (rate, name) == ("100", order)
    assert int(waiting) >= 0
    assert int(steps) > 10
    assert int(claims) > 0
    # The columns agree with each other: whatever this machine is like.
    expected = int(claims) * float(claim_us) / 10 / (int(steps) * float(step_ms))
    assert float(share) == pytest.approx(expected, rel=0.05, abs=0.02)
