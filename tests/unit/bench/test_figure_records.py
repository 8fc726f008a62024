"""Lines of results: what is read, what is refused, and which of several measurements counts."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from orca.bench.figures.figure import Figure, FiguresError, parse, read_file, read_results
from orca.bench.figures.query import FigureQuery, NothingChosen, Results


def record(**changes: Any) -> dict[str, Any]:
    """Build a good line as plain data, with some changes."""
    good: dict[str, Any] = {
        "what": "Tokens per second",
        "settings": {"batch": 16, "model": "small"},
        "value": 200,
        "unit": "tokens/s",
        "spread": [190, 210.5],
        "runs": 3,
        "processor": "AMD Zen 4, 2 cores",
        "date": "2026-11-27",
        "commit": "ff304a1",
        "command": "orca bench host",
    }
    return good | changes


def figure(**changes: Any) -> Figure:
    return parse(json.dumps(record(**changes)))


def test_a_figure_is_read_as_it_was_written() -> None:
    read = figure(commit=None, spread=None, runs=None)
    assert read.date == date(2026, 11, 27)
    assert parse(read.to_line()) == read


def test_the_files_of_a_folder_are_benches(tmp_path: Path) -> None:
    for name in ("host", "peers"):
        (tmp_path / f"{name}.jsonl").write_text(figure(what=name).to_line() + "\n")
    assert {bench: [each.what for each in found] for bench, found in read_results(tmp_path).items()} == {
        "host": ["host"],
        "peers": ["peers"],
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"value": "200"}, "value must be a finite number, not '200'"),
        ({"value": True}, "value must be a finite number, not True"),
        ({"value": float("nan")}, "value must be a finite number, not nan"),
        ({"spread": [1]}, "spread must be null or [lowest, highest], not [1]"),
        ({"spread": [210, 220]}, "value 200 is not within spread [210, 220]"),
        ({"runs": 0}, "runs must be null or a whole number from 1 on, not 0"),
        ({"runs": 2.5}, "runs must be null or a whole number from 1 on, not 2.5"),
        ({"what": ""}, "what must be a text of one line without '|', not ''"),
        ({"processor": None}, "processor must be a text"),
        ({"command": "a | b"}, "command must be a text"),
        ({"date": "yesterday"}, "date must be YYYY-MM-DD, not 'yesterday'"),
        ({"date": None}, "date must be YYYY-MM-DD, not None"),
        ({"commit": "HEAD"}, "commit must be null or a hash as git shows it, not 'HEAD'"),
        ({"settings": []}, "settings must be an object, not []"),
        ({"settings": {"Batch": 1}}, "settings cannot have the key 'Batch'"),
        ({"settings": {"unit": "s"}}, "settings cannot have the key 'unit'"),
        ({"settings": {"batch": None}}, "batch must be a finite number, not None"),
    ],
)
def test_a_wrong_line_is_refused_with_its_file_and_number(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "host.jsonl"
    file.write_text(f"{figure().to_line()}\n{json.dumps(record(**changes))}\n")
    with pytest.raises(FiguresError) as raised:
        read_file(file)
    assert str(raised.value).startswith("host.jsonl:2: ")
    assert complaint in str(raised.value)


@pytest.mark.parametrize("key", sorted(record()))
def test_no_key_may_be_left_out(key: str) -> None:
    short = record()
    del short[key]
    with pytest.raises(ValueError, match=f"missing key '{key}'"):
        parse(json.dumps(short))


@pytest.mark.parametrize("line", ["", "[]", '"text"', "{"])
def test_a_line_that_is_no_json_object_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "host.jsonl").write_text(line + "\n")
    with pytest.raises(FiguresError, match=r"^host\.jsonl:1: "):
        read_results(tmp_path)


def test_the_latest_figure_of_an_identity_counts() -> None:
    old, new = figure(value=200, date="2026-11-27"), figure(value=190.5, date="2026-11-28", commit="0554fea")
    other = figure(value=205, settings={"batch": 32, "model": "small"})
    results = Results({"host": [new, old, other]})
    found = results.choose(FigureQuery(bench="host", what=["Tokens per second"], where={"batch": ["16"]}))
    assert found == [new]
    assert results.unused == ["host: Tokens per second (1 figure)"]


def test_the_last_line_of_a_day_counts() -> None:
    results = Results({"host": [figure(value=200), figure(value=199)]})
    assert [each.value for each in results.choose(FigureQuery(bench="host", what=["Tokens per second"]))] == [199]


@pytest.mark.parametrize(
    "query",
    [
        FigureQuery(bench="no-such-bench", what=["Tokens per second"]),
        FigureQuery(bench="host", what=["No such figure"]),
        FigureQuery(bench="host", what=["Tokens per second", "No such figure"]),
        FigureQuery(bench="host", what=["Tokens per second"], where={"batch": ["17"]}),
    ],
)
def test_a_query_that_matches_no_figure_is_an_error(query: FigureQuery) -> None:
    with pytest.raises(NothingChosen):
        Results({"host": [figure()]}).choose(query)
