"""Profiles of earlier starts: found by their key, and not used if anything is wrong with them."""

from pathlib import Path

import pytest

from orca.cli.up.slo.profiles import find_profile, keep_profile, profile_folder
from orca.planner.profile.profile import to_json
from support.planner.profiles import key, profile


def test_a_kept_profile_is_found_again(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "new" / "profiles"
    assert find_profile(folder, key(), said.append) is None
    keep_profile(folder, profile(), said.append)
    assert find_profile(folder, key(), said.append) == profile()
    assert find_profile(folder, key(ranks=(1,)), said.append) is None
    assert [file.name for file in folder.iterdir()] == [f"{key().digest}.json"]
    assert not said


@pytest.mark.parametrize("text", [b"", b"{", b"{}", b"[]", b"\xff", to_json(profile())[:-200]])
def test_a_damaged_profile_is_not_used(tmp_path: Path, text: bytes) -> None:
    (tmp_path / f"{key().digest}.json").write_bytes(text)
    said: list[str] = []
    assert find_profile(tmp_path, key(), said.append) is None
    [line] = said
    assert "is not used: profile" in line


def test_a_profile_under_the_name_of_another_key_is_not_used(tmp_path: Path) -> None:
    (tmp_path / f"{key().digest}.json").write_bytes(to_json(profile(ranks=(1,))))
    said: list[str] = []
    assert find_profile(tmp_path, key(), said.append) is None
    assert "is not used: the profile has another key: its ranks are 1, not 1, 2" in said[0]


def test_a_profile_that_cannot_be_kept_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    keep_profile(tmp_path / "file" / "profiles", profile(), said.append)
    assert "the profile is not kept, the next start measures again" in said[0]


def test_profiles_lie_in_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_folder() == tmp_path / "orca" / "profiles"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert profile_folder() == tmp_path / "me" / ".cache" / "orca" / "profiles"
