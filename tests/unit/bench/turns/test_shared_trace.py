"""A trace with ids of prefixes: prompts are equal where ids are equal, and every bad line is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orca.bench.turns.shared_trace import SharedTrace, read_shared_trace
from orca.core.domain.errors import SettingError


def a_line(*ids: Any, prompt: int = 0, output: int = 32, at_ms: int = 0, **changes: Any) -> dict[str, Any]:
    fields = {"timestamp": at_ms, "input_length": prompt or 512 * len(ids), "output_length": output}
    return fields | {"hash_ids": list(ids)} | changes


def written(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    (file := folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return file


def read(folder: Path, *lines: dict[str, Any], divisor: int = 16, most: int | None = None) -> SharedTrace:
    return read_shared_trace(written(folder, lines), divisor=divisor, requests_max=most)


def test_prompts_are_equal_as_far_as_their_ids_are(tmp_path: Path) -> None:
    trace = read(tmp_path, a_line(3, 4, 5), a_line(3, 4, 6), a_line(7))
    first, second, third = map(trace.prompt, range(3))
    assert len(first) == len(second) == 3 * 32
    assert first[:64] == second[:64]
    assert not set(first[64:]) & set(second[64:])
    assert not set(third) & {*first, *second}


def test_a_short_last_block_is_shared_too(tmp_path: Path) -> None:
    trace = read(tmp_path, a_line(1, 2, prompt=512 + 100), a_line(1, 2, prompt=512 + 100), a_line(1, 3, prompt=612))
    assert len(trace.prompt(0)) == 32 + 7, "a length is rounded up"
    assert trace.prompt(0) == trace.prompt(1)
    assert not set(trace.prompt(0)[32:]) & set(trace.prompt(2)[32:])


def test_lengths_and_times_are_those_of_the_file(tmp_path: Path) -> None:
    lines = a_line(1, prompt=500, output=33, at_ms=2_000), a_line(2, 3, prompt=600, output=1, at_ms=2_500)
    requests = read(tmp_path, *lines, divisor=1).trace(2.0).requests
    assert [(each.arrival_s, each.prompt_tokens, each.new_tokens) for each in requests] == [(4, 500, 33), (5, 600, 1)]
    shorter = read(tmp_path, *lines).trace(1.0).requests
    assert [(each.arrival_s, each.prompt_tokens, each.new_tokens) for each in shorter] == [(2, 32, 3), (2.5, 38, 1)]


def test_tokens_of_equal_ids_count_once(tmp_path: Path) -> None:
    trace = read(tmp_path, a_line(1, 2), a_line(1, 3), a_line(1, 2), a_line(1, 3, 4, prompt=1_024 + 16))
    assert trace.prompt_tokens == 64 + 64 + 64 + 65
    assert trace.distinct_tokens == 64 + 32 + 1
    # The last token of a prompt is always computed, so a prompt that was there before lacks a KV block.
    assert trace.found_at_most(16) == 0 + 32 + 48 + 64


def test_only_the_first_requests_are_read(tmp_path: Path) -> None:
    assert len(read(tmp_path, a_line(1), a_line(2), {"bad": "line"}, most=2).requests) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ([1], "line 2: not a JSON object"),
        ({"timestamp": 1}, "line 2: an object needs .* input_length, output_length, hash_ids is missing"),
        (a_line(1, timestamp="now"), "line 2: timestamp is a whole number, not 'now'"),
        (a_line(1, timestamp=-5), "line 2: timestamp is from 0 to 2,147,483,647, not -5"),
        (a_line(1, timestamp=4), "line 2: timestamp 4 is before that of the request before it, 5"),
        (a_line(1, input_length=0, at_ms=9), "line 2: input_length is from 1"),
        (a_line(1, output_length=0, at_ms=9), "line 2: output_length is from 1"),
        (a_line(1, output_length=True, at_ms=9), "line 2: output_length is a whole number, not 'True'"),
        (a_line(1, hash_ids=7, at_ms=9), "line 2: hash_ids are a list, not '7'"),
        (a_line(1, 2, prompt=512, at_ms=9), "line 2: 512 prompt tokens have 1 hash_ids, not 2"),
        (a_line("1", at_ms=9), "line 2: a hash id is a whole number, not '1'"),
        (a_line(2**22, at_ms=9), "line 2: a hash id is from 0 to 4,194,303, not 4194304"),
        (a_line(2, at_ms=9), "line 2: hash id 2 is the first one, and after 1 in a line before"),
        (a_line(1, 1, at_ms=9), "line 2: hash id 1 is after 1, and the first one in a line before"),
        (a_line(1, prompt=511, at_ms=9), "line 2: hash id 1 is of 511 tokens, and of 512 in a line before"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_number(line: Any, complaint: str, tmp_path: Path) -> None:
    file = written(tmp_path, [a_line(1, 2, at_ms=5), line])
    with pytest.raises(SettingError, match=f"trace.jsonl, {complaint}"):
        read_shared_trace(file)


@pytest.mark.parametrize(
    ("text", "complaint"), [("", "has no requests"), ("\n\n", "has no requests"), ('{"time', "line 1: not JSON")]
)
def test_a_file_without_requests_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    (file := tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(SettingError, match=complaint):
        read_shared_trace(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"missing\.jsonl cannot be read"):
        read_shared_trace(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("divisor", [0, -1, 3, 1_024])
def test_a_divisor_that_leaves_no_whole_blocks_is_refused(divisor: int, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=f"a divisor of 512, not by {divisor}"):
        read(tmp_path, a_line(1), divisor=divisor)
