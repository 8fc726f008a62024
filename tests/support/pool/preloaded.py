"""Builds a redis-server with a library of the tests loaded before all others."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.pool.kinds import redis_binary


def preloaded_redis(folder: Path, kind: str, source: Path, **environment: Path) -> Path:
    """Return a redis-server of a kind whose C library functions are those of a source file.

    Args: environment: variables of the server.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler for {source.name}")
    library = folder / source.with_suffix(".so").name
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    variables = " ".join(f"{name}={value}" for name, value in {"LD_PRELOAD": library, **environment}.items())
    binary = folder / "redis-server"
    binary.write_text(f'#!/bin/sh\nexec env {variables} {redis_binary(kind)} "$@"\n')
    binary.chmod(0o755)
    return binary
