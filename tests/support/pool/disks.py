"""Disks of the pool's tests: one whose fsyncs take as long as a test says."""

from pathlib import Path

from support.pool.preloaded import preloaded_redis

_SHIM = Path(__file__).with_name("slow_fsync.c")


class SlowDisk:
    """`binary` is a redis-server whose fsyncs wait for this disk. It is well at first."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._slow_ms = folder / "slow_ms"
        self.binary = preloaded_redis(folder, kind, _SHIM, SLOW_FSYNC=self._slow_ms)

    def slow(self, fsync_ms: int) -> None:
        """Slow each fsync down to this time from now on, also one in flight."""
        # In one step: read half-written, it would be well for a moment.
        draft = self._slow_ms.with_suffix(".new")
        draft.write_text(str(fsync_ms))
        draft.replace(self._slow_ms)

    def heal(self) -> None:
        self._slow_ms.unlink(missing_ok=True)
