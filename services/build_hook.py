"""Writes the commit into wheels and source distributions, where `orca --version` finds it (orca/cli/version.py).

The commit is that of the checkout, or the variable ORCA_COMMIT where there is no checkout, as in an image. A build that
knows neither leaves it out. An editable install reads the commit from git each time.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACES = {"wheel": "orca/cli/commit.txt", "sdist": "services/orca/cli/commit.txt"}


class CommitHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds one file to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        commit = os.environ.get("ORCA_COMMIT") or commit_of(Path(self.root))
        if version == "editable" or not commit:
            return
        file = Path(tempfile.mkdtemp(prefix="orca-commit-")) / "commit.txt"
        file.write_text(commit + "\n")
        build_data["force_include"][str(file)] = PLACES[self.target_name]

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - a hook's shape
        for name in build_data["force_include"]:
            file = Path(name)
            if file.parent.name.startswith("orca-commit-"):
                file.unlink()
                file.parent.rmdir()


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout, with "-dirty" if files differ; None without a repository or git."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
