"""`orca keys make`."""

import pytest

from orca.cli.main import main
from orca.core.api_keys import KeyLimits, key_digest, parse_keys


def test_a_key_is_printed_with_its_line_for_the_key_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "make", "alice", "--requests-per-minute", "60", "--queue-percent", "50"]) == 0
    key, written = (said.partition(": ")[2].strip() for said in capsys.readouterr().out.splitlines())
    [read] = parse_keys(written)
    assert (read.name, read.digest) == ("alice", key_digest(key))
    assert read.limits == KeyLimits(requests_per_minute=60, queue_percent=50)
    assert len(key) > 40


@pytest.mark.parametrize("bound", [-8, -1, 0, 8])
def test_a_key_may_have_a_bound_of_priority(bound: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "make", "alice", "--most-urgent-priority", str(bound)]) == 0
    [read] = parse_keys(capsys.readouterr().out.splitlines()[1].partition(": ")[2])
    assert read.limits == KeyLimits(most_urgent_priority=bound)


def test_two_keys_differ(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["keys", "make", "alice"]) == 0
    assert len(set(capsys.readouterr().out.splitlines())) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a b"], "NAME 'a b' is not valid: use up to 64 letters"),
        (["alice", "--calls", "0"], "calls must occur once and be a whole number of 1 or more"),
        (["alice", "--queue-percent", "101"], "queue_percent must be 100 or less"),
        (
            ["alice", "--most-urgent-priority", "-9"],
            "most_urgent_priority must occur once and be a whole number from -8",
        ),
        (["alice", "--most-urgent-priority", "9"], "must occur once and be a whole number from -8 to 8"),
        (["alice", "--most-urgent-priority", "1.5"], "--most-urgent-priority: invalid int value: '1.5'"),
    ],
)
def test_a_bad_name_or_limit_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "make", *arguments]) == 2
    assert said in capsys.readouterr().err
