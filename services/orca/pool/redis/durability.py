"""An answer may be returned once a kill -9 of Redis can no longer undo its content.

A killed Redis loses what it has not yet given to the kernel. The changes of one turn of its event loop gather in a
buffer, which is written, whole, to the append-only file before the answers of that turn leave. There is one exception.
Under `appendfsync everysec`, while a background fsync is in progress, Redis delays the write for up to two seconds and
sends the answers all the same. INFO shows such an fsync (aof_pending_bio_fsync). An answer counts as written if one of
these holds:

1. Its script found no fsync in progress. Only Redis' main thread begins one, and only after a write of the whole
   buffer (or, in 6.2, after the end of a rewrite, whose new file holds the buffer too): by the end of this turn all is
   written.
2. A later INFO shows none: then rule 1 holds for all that came before it.
3. Between two later INFOs the file grew: a write takes the whole buffer. The end of a rewrite sets a new size of the
   file, and a new base size. If the base size is the same, what exceeds the earlier size was written since.

The later INFOs must come from the same run of Redis: another run has read back what the first had written, and may lack
the rest. Without a file, and under `appendfsync always`, no fsync is ever in progress.

Three cases are not covered. The answers of one turn are lost if its write fails because the disk is full; from the next
turn on Redis refuses writes. Between `CONFIG SET appendonly yes` and the end of the rewrite that it begins there is no
file to read back. Several `io-threads` of Redis 8 may answer before the turn's write.

Source: flushAppendOnlyFile, beforeSleep, serverCron and backgroundRewriteDoneHandler of Redis 6.2, 7.0 and 7.2.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orca.core.domain.errors import PoolUnavailable

_POLL_S = 0.003
"""Pause before each INFO: far below the fsync that it waits for. Calls that come during the pause share the INFO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendOnlyFileState:
    """The state of the append-only file of Redis, by INFO."""

    run: str  # drawn at each start of a server
    is_syncing: bool  # writes that come now may be delayed
    can_write: bool
    bytes_written: int
    base_bytes: int  # size of the file at the end of the last rewrite

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "AppendOnlyFileState":
        """Args: info: fields of the sections `server` and `persistence`. Without a file the numbers are absent."""
        return cls(
            run=info["run_id"],
            is_syncing=info.get("aof_pending_bio_fsync", 0) > 0,
            can_write=info["aof_last_write_status"] == "ok",
            bytes_written=info.get("aof_current_size", 0),
            base_bytes=info.get("aof_base_size", 0),
        )

    def has_all_before(self, first: "AppendOnlyFileState") -> bool:
        """Return true if all before the `first` INFO is written, or will be by the end of this turn."""
        has_grown = self.base_bytes == first.base_bytes and self.bytes_written > first.bytes_written
        return self.can_write and (has_grown or not self.is_syncing)


class FsyncWatcher:
    """Polls Redis on behalf of all calls of a process that were answered while an fsync was in progress."""

    def __init__(self, poll: Callable[[], Awaitable[AppendOnlyFileState]], timeout_s: float) -> None:
        """Args: poll: raises PoolUnavailable. timeout_s: bound on one `wait_until_written`."""
        self._poll = poll
        self._timeout_s = timeout_s
        self._waiting: list[asyncio.Future[AppendOnlyFileState]] = []
        self._polling: asyncio.Task[None] | None = None

    async def wait_until_written(self, run: str) -> None:
        """Wait until all that this run of Redis answered before the call is written.

        Raises: PoolUnavailable if that takes too long, or if Redis was restarted meanwhile.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                first = now = await self._next_state(run)
                while not now.has_all_before(first):
                    now = await self._next_state(run)
                    if now.base_bytes != first.base_bytes:
                        first = now
        except TimeoutError as error:
            raise PoolUnavailable("Redis did not write its append-only file in time") from error

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling

    async def _next_state(self, run: str) -> AppendOnlyFileState:
        """Return the state by the next INFO, one that is sent after this call."""
        answer: asyncio.Future[AppendOnlyFileState] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll_for_all(), name="pool-fsync")
        state = await answer
        if state.run != run:
            raise PoolUnavailable("Redis was restarted and may have lost what it answered before")
        return state

    async def _poll_for_all(self) -> None:
        """Poll while any call waits, one INFO at a time, each for all that waited when it was sent."""
        while self._waiting:
            await asyncio.sleep(_POLL_S)
            answers, self._waiting = self._waiting, []
            try:
                state = await self._poll()
            except Exception as error:
                # Also what nobody expects: the waiting calls get the error, and later ones poll again.
                for answer in _awaited(answers):
                    answer.set_exception(error)
            else:
                for answer in _awaited(answers):
                    answer.set_result(state)


def _awaited(answers: Iterable[asyncio.Future[AppendOnlyFileState]]) -> Iterator[asyncio.Future[AppendOnlyFileState]]:
    """Return the answers whose callers have not given up meanwhile."""
    return (answer for answer in answers if not answer.done())
