"""Commands of this machine that run to their end; those that stay are kubernetes/components.py's."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cluster.machine.errors import ClusterError

_SAID_CHARACTERS = 3000


def run(
    *words: str | Path,
    entered: str | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    within_s: float = 120.0,
) -> str:
    """What the command wrote to its standard output.

    Args:
        entered: its standard input; None gives it an empty one.
        environment: added to this process's own.
        folder: where it runs.
    Raises: ClusterError with the last words of what it said, when it fails, is not installed, or takes too long.
    """
    line = " ".join(str(word) for word in words)
    try:
        ran = subprocess.run(
            [str(word) for word in words],
            input=entered or "",
            capture_output=True,
            text=True,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            timeout=within_s,
            check=False,
        )
    except FileNotFoundError as missing:
        raise ClusterError(f"{words[0]}: not installed") from missing
    except subprocess.TimeoutExpired as slow:
        raise ClusterError(f"{_shortened(line)}: not done after {within_s:.0f} s") from slow
    if ran.returncode:
        said = (ran.stderr.strip() or ran.stdout.strip())[-_SAID_CHARACTERS:]
        raise ClusterError(f"{_shortened(line)}: ended with status {ran.returncode}\n{said}")
    return ran.stdout


def _shortened(line: str) -> str:
    return line if len(line) < 200 else f"{line[:200]}..."
