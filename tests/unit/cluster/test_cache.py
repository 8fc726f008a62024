"""The cache: whole things or none, named by all that decides their content."""

from pathlib import Path

import pytest

from cluster.machine.cache import build_once, cache_folder, check_space, content_key
from cluster.machine.errors import ClusterError


def fill(folder: Path) -> None:
    (folder / "file").write_text("whole")


def fail_half_way(folder: Path) -> None:
    fill(folder)
    raise ClusterError("no compiler")


def test_a_thing_is_built_once(tmp_path: Path) -> None:
    assert [build_once(tmp_path / "thing", fill), build_once(tmp_path / "thing", fail_half_way)] == [True, False]
    assert (tmp_path / "thing" / "file").read_text() == "whole"


def test_a_failed_build_leaves_nothing_incomplete(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no compiler"):
        build_once(tmp_path / "thing", fail_half_way)
    assert not (tmp_path / "thing").exists()


def test_files_of_a_killed_build_are_not_used_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "thing.unfinished").mkdir()
    (tmp_path / "thing.unfinished" / "rest").touch()
    build_once(tmp_path / "thing", fill)
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["file"]
    assert not (tmp_path / "thing.unfinished").exists()


def test_a_key_changes_with_each_part_and_where_parts_meet(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("one")
    before = content_key("a", tmp_path / "go.mod")
    (tmp_path / "go.mod").write_text("two")
    assert len({before, content_key("a", tmp_path / "go.mod"), content_key("ab", "c"), content_key("a", "bc")}) == 4


def test_the_cache_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORCA_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_too_little_disk_space_is_reported_in_numbers(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"a cluster needs 1000000.0 GB below .*, \d+\.\d GB are free there"):
        check_space(tmp_path / "not" / "yet", wanted_gb=1e6, purpose="a cluster")
