"""Runs commands of this machine to their end; kubernetes/components.py starts those that stay."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cluster.machine.errors import ClusterError

_OUTPUT_CHARACTERS = 3000


def run(
    *words: str | Path,
    standard_input: str | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    within_s: float = 120.0,
) -> str:
    """Run a command and return its standard output.

    Args:
        standard_input: text for it; None: empty.
        environment: variables in addition to this process's own.
        folder: its working directory.
    Raises: ClusterError with the end of its output, if it fails, is not installed, or takes too long.
    """
    line = " ".join(str(word) for word in words)
    try:
        ran = subprocess.run(
            [str(word) for word in words],
            input=standard_input or "",
            capture_output=True,
            text=True,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            timeout=within_s,
            check=False,
        )
    except FileNotFoundError as missing:
        raise ClusterError(f"{words[0]} is not installed") from missing
    except subprocess.TimeoutExpired as slow:
        raise ClusterError(f"{_shorten(line)}: did not end within {within_s:.0f} s") from slow
    if ran.returncode:
        output = (ran.stderr.strip() or ran.stdout.strip())[-_OUTPUT_CHARACTERS:]
        raise ClusterError(f"{_shorten(line)}: ended with status {ran.returncode}\n{output}")
    return ran.stdout


def _shorten(line: str) -> str:
    return line if len(line) < 200 else f"{line[:200]}..."
