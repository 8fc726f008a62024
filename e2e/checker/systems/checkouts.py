"""Releases side by side: exports the code of a git revision, and returns the environment of its processes."""

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
CODE_FOLDERS = ("services", "kernels")
"""Folders with the code of a process of the system."""

_LOCATE_SCRIPT = """
import importlib.util, json
from orca.pool.schemas import SCHEMAS
parts = ("orca.cli.main", "orca.cli.pool", "orca.gateway.service", "orca.scheduler.service", "orca.worker.service")
found = [importlib.util.find_spec(part).origin for part in (*parts, "orca.pool.schemas")]
print(json.dumps({"files": found, "schemas": [SCHEMAS.oldest, SCHEMAS.newest]}))
"""

_LIST_MODELS_SCRIPT = """
import json
from orca.core.domain.model import FAMILIES
print(json.dumps(list(FAMILIES)))
"""


class ReleaseError(Exception):
    """A revision cannot run; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Release:
    """The code of one release."""

    revision: str  # for git; "working tree" for the checker's own working tree
    folder: Path
    schemas: tuple[int, int]  # oldest and newest schema number that it reads and writes

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for a process of this release: its folders come before installed packages."""
        return dict(inherited) | {"PYTHONPATH": _python_path(self.folder)}

    def check_model(self, model_type: str) -> None:
        """Raises: ReleaseError if this release says that it does not know a type of models."""
        environment = self.environment(os.environ)
        command = [sys.executable, "-c", _LIST_MODELS_SCRIPT]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=self.folder)
        if ran.returncode == 0 and model_type not in json.loads(ran.stdout):
            raise ReleaseError(
                f"{self.revision} does not know models of type {model_type}; choose a revision that does, or another "
                "model"
            )


@dataclass(frozen=True, slots=True)
class Releases:
    """The last release and the one that replaces it."""

    before: Release
    after: Release

    def name_of(self, release: Release) -> str:
        """Return `before` or `after`."""
        return "before" if release == self.before else "after"


def last_release(root: Path = ROOT) -> str:
    """Return the newest tag, or the previous commit if there is no tag. Raises: ReleaseError."""
    tags = _git(root, "tag", "--sort=-creatordate").split()
    return tags[0] if tags else _git(root, "rev-parse", "--short", "HEAD~1").strip()


def export(revision: str, folder: Path, root: Path = ROOT) -> Release:
    """Export the code of a revision to a new folder. Raises: ReleaseError if git or Python does not know it."""
    folder.mkdir(parents=True)
    archive = folder / "rooms.tar"
    _git(root, "archive", "--format=tar", f"--output={archive}", revision, *CODE_FOLDERS)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    return _inspect(revision, folder)


def working_tree(root: Path = ROOT) -> Release:
    """Return the release in the checker's own working tree. Raises: ReleaseError."""
    return _inspect("working tree", root)


def _inspect(revision: str, folder: Path) -> Release:
    """Check that Python imports the parts from this folder, and not from an installed package."""
    environment = os.environ | {"PYTHONPATH": _python_path(folder)}
    ran = subprocess.run(
        [sys.executable, "-c", _LOCATE_SCRIPT], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    if ran.returncode:
        raise ReleaseError(f"{revision} does not start: {ran.stderr.strip()[-800:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    strangers = [file for file in found["files"] if not Path(file).is_relative_to(folder)]
    if strangers:
        raise ReleaseError(f"{revision} lacks a module: Python imported {strangers[0]} from another folder")
    oldest, newest = found["schemas"]
    return Release(revision, folder, (oldest, newest))


def _python_path(folder: Path) -> str:
    return os.pathsep.join(str(folder / room) for room in CODE_FOLDERS)


def _git(root: Path, *words: str) -> str:
    ran = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ReleaseError(f"git {' '.join(words)}: {ran.stderr.strip()}")
    return ran.stdout
