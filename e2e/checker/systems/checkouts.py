"""Releases side by side: what a git revision holds, and the environment in which a process is of that release."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ROOMS = ("services", "kernels")
"""Folders of the distribution that go into a process of the system."""

_WHERE = """
import importlib.util, json
from orca.pool.schemas import SCHEMAS
parts = ("orca.cli.main", "orca.cli.pool", "orca.gateway.service", "orca.scheduler.service", "orca.worker.service")
found = [importlib.util.find_spec(part).origin for part in (*parts, "orca.pool.schemas")]
print(json.dumps({"files": found, "schemas": [SCHEMAS.oldest, SCHEMAS.newest]}))
"""


class NoSuchRelease(Exception):
    """A revision that cannot be run, and why."""


@dataclass(frozen=True, slots=True)
class Release:
    """What runs when a part is of it."""

    revision: str  # as git names it; "working tree" for the files beside the checker
    folder: Path
    schemas: tuple[int, int]  # oldest and newest number that it reads and writes

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables for a process of this release: its folders come before whatever is installed."""
        return dict(inherited) | {"PYTHONPATH": _python_path(self.folder)}


@dataclass(frozen=True, slots=True)
class Releases:
    """The last one and the one that replaces it."""

    before: Release
    after: Release

    def name_of(self, release: Release) -> str:
        return "before" if release == self.before else "after"


def last_release(root: Path = ROOT) -> str:
    """The newest tag, or while there is none the commit before this one. Raises: NoSuchRelease."""
    tags = _git(root, "tag", "--sort=-creatordate").split()
    return tags[0] if tags else _git(root, "rev-parse", "--short", "HEAD~1").strip()


def export(revision: str, folder: Path, root: Path = ROOT) -> Release:
    """The rooms of a revision in a new folder. Raises: NoSuchRelease when git or Python does not know it."""
    folder.mkdir(parents=True)
    archive = folder / "rooms.tar"
    _git(root, "archive", "--format=tar", f"--output={archive}", revision, *ROOMS)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    return _look_into(revision, folder)


def working_tree(root: Path = ROOT) -> Release:
    """The release that the checker stands beside. Raises: NoSuchRelease."""
    return _look_into("working tree", root)


def _look_into(revision: str, folder: Path) -> Release:
    """The parts must come out of the folder, and not out of what is installed."""
    environment = os.environ | {"PYTHONPATH": _python_path(folder)}
    ran = subprocess.run(
        [sys.executable, "-c", _WHERE], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    if ran.returncode:
        raise NoSuchRelease(f"{revision} does not start: {ran.stderr.strip()[-800:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    strangers = [file for file in found["files"] if not Path(file).is_relative_to(folder)]
    if strangers:
        raise NoSuchRelease(f"{revision} lacks {strangers[0]}, which came from elsewhere")
    oldest, newest = found["schemas"]
    return Release(revision, folder, (oldest, newest))


def _python_path(folder: Path) -> str:
    return os.pathsep.join(str(folder / room) for room in ROOMS)


def _git(root: Path, *words: str) -> str:
    ran = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise NoSuchRelease(f"git {' '.join(words)}: {ran.stderr.strip()}")
    return ran.stdout
