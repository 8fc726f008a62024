"""The output of `orca --version`: the version, and the commit that the code was built or runs from."""

import argparse
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

COMMIT_FILE = "commit.txt"
"""Written beside this module when a wheel is built (services/build_hook.py)."""
_HERE = Path(__file__).parent
_CHECKOUT = _HERE.parents[2]
_GIT_S = 5.0


class PrintVersion(argparse.Action):
    """A flag that prints the version and ends. The commit is looked up only then."""

    def __init__(self, option_strings: list[str], dest: str, **arguments: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print version and commit", **arguments)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(version_text())
        parser.exit()


def version_text(folder: Path = _HERE, checkout: Path = _CHECKOUT) -> str:
    """Return version and commit, or the version alone where no commit is known.

    Args:
        folder: of the file that a build has written.
        checkout: the folder of a git repository, if this code runs from one.
    """
    written = folder / COMMIT_FILE
    commit = written.read_text().strip() if written.exists() else _commit_of(checkout)
    return f"orca {version('orca-serving')}" + (f" (commit {commit})" if commit else "")


def _commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout, with "-dirty" if files differ; None where git does not say."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None
