"""The profiles of earlier starts, one file for each key: `orca/profiles/DIGEST.json` below the user's cache folder."""

import os
from collections.abc import Callable
from pathlib import Path

from orca.core.domain.errors import SettingError
from orca.core.process.whole_file import write_whole
from orca.planner.profile.profile import Profile, ProfileKey, read_profile, to_json

Report = Callable[[str], None]


def profile_folder() -> Path:
    """Return the folder of profiles. It need not exist."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "orca" / "profiles"


def find_profile(folder: Path, key: ProfileKey, report: Report) -> Profile | None:
    """Return the profile of a key; None if there is none that can be used.

    Args: report: called with the reason why a file cannot be used.
    """
    file = _file(folder, key)
    if not file.exists():
        return None
    try:
        profile = read_profile(file)
        profile.check_key(key)
    except SettingError as error:
        report(f"the kept profile {file} is not used: {error}")
        return None
    return profile


def keep_profile(folder: Path, profile: Profile, report: Report) -> None:
    """Write a profile for later starts, whole or not at all.

    Args: report: called with the reason if it cannot be written.
    """
    file = _file(folder, profile.key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, to_json(profile))
    except OSError as error:
        report(f"the profile is not kept, the next start measures again: {file}: {error.strerror}")


def _file(folder: Path, key: ProfileKey) -> Path:
    return folder / f"{key.digest}.json"
