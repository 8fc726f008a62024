"""Disks of the pool's tests: one whose fsyncs take as long as a test says."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.pool.kinds import redis_binary

_SHIM = Path(__file__).with_name("slow_fsync.c")


class SlowDisk:
    """`binary` is a redis-server whose fsyncs wait for this disk. It is well at first."""

    def __init__(self, folder: Path, kind: str) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler for the slow fsync")
        library = folder / "slow_fsync.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _SHIM, "-ldl"], check=True)
        self._slow_ms = folder / "slow_ms"
        self.binary = folder / "redis-server"
        preload = f"LD_PRELOAD={library} SLOW_FSYNC={self._slow_ms}"
        self.binary.write_text(f'#!/bin/sh\nexec env {preload} {redis_binary(kind)} "$@"\n')
        self.binary.chmod(0o755)

    def slow(self, fsync_ms: int) -> None:
        """Slow each fsync down to this time from now on, also one in flight."""
        # In one step: read half-written, it would be well for a moment.
        draft = self._slow_ms.with_suffix(".new")
        draft.write_text(str(fsync_ms))
        draft.replace(self._slow_ms)

    def heal(self) -> None:
        self._slow_ms.unlink(missing_ok=True)
