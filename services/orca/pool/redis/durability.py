"""When an answer may leave: once a kill -9 of Redis can no longer take back what it tells of.

A killed Redis loses what it has not yet given to the kernel. What a turn of its event loop changes gathers in a buffer,
which is written, whole, to the append-only file before the answers of that turn leave. With one exception: under
`appendfsync everysec`, while a background fsync is under way, the write is put off for up to two seconds, and the
answers leave all the same. INFO tells of such an fsync (aof_pending_bio_fsync), and an answer is settled when one of
these holds:

1. Its script found none under way. Only Redis' main thread begins one, and only behind a write of the whole buffer (or,
   in 6.2, behind the end of a rewrite, whose new file holds the buffer too): by the end of this turn all is written.
2. A later question finds none: the same, for all that came before it.
3. Between two later questions the file grew: a write takes the whole buffer. The end of a rewrite sets the file's size
   anew, and its base size with it; where the base is the same, what is beyond the earlier size was written since.

The later questions go to the same run of Redis: another one has read back what the first had written, and may lack the
rest. Without a file, and under `appendfsync always`, no fsync is ever under way.

Not covered: the answers of the one turn whose write fails because the disk is full (from the next on Redis refuses what
would write); the time between `CONFIG SET appendonly yes` and the end of the rewrite that it begins, when there is no
file to read back; and several `io-threads` of Redis 8, which may answer ahead of the turn's write.

Source: flushAppendOnlyFile, beforeSleep, serverCron and backgroundRewriteDoneHandler of Redis 6.2, 7.0 and 7.2.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orca.core.domain.errors import PoolUnavailable

_AGAIN_S = 0.003
"""Before each question: far below the fsync that is waited for, and those who come meanwhile share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """What Redis says of its append-only file."""

    run: str  # drawn at each start of a server
    is_syncing: bool  # what comes now may be held back
    can_write: bool
    bytes_written: int
    base_bytes: int  # of them, at the end of the last rewrite

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "FileState":
        """Args: info: of the sections `server` and `persistence`. Without a file the numbers are absent."""
        return cls(
            run=info["run_id"],
            is_syncing=info.get("aof_pending_bio_fsync", 0) > 0,
            can_write=info["aof_last_write_status"] == "ok",
            bytes_written=info.get("aof_current_size", 0),
            base_bytes=info.get("aof_base_size", 0),
        )

    def has_all_before(self, first: "FileState") -> bool:
        """Is written, or will be by the end of this turn, what came before the `first` question?"""
        has_grown = self.base_bytes == first.base_bytes and self.bytes_written > first.bytes_written
        return self.can_write and (has_grown or not self.is_syncing)


class Settling:
    """Asks for all calls of a process that were answered while an fsync was under way."""

    def __init__(self, ask: Callable[[], Awaitable[FileState]], timeout_s: float) -> None:
        """Args: ask: raises PoolUnavailable. timeout_s: of one `settle`."""
        self._ask = ask
        self._timeout_s = timeout_s
        self._waiting: list[asyncio.Future[FileState]] = []
        self._asking: asyncio.Task[None] | None = None

    async def settle(self, run: str) -> None:
        """Wait until all that this run of Redis answered before the call is written.

        Raises: PoolUnavailable when that does not come in time, or when Redis was started anew meanwhile.
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
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking

    async def _next_state(self, run: str) -> FileState:
        """What the next question finds, one that is asked after this call."""
        answer: asyncio.Future[FileState] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_for_all(), name="pool-settling")
        state = await answer
        if state.run != run:
            raise PoolUnavailable("Redis was started anew and may have lost what it answered before")
        return state

    async def _ask_for_all(self) -> None:
        """One question at a time, for all who waited when it was asked, as long as anybody does."""
        while self._waiting:
            await asyncio.sleep(_AGAIN_S)
            asked, self._waiting = self._waiting, []
            try:
                state = await self._ask()
            except Exception as error:
                # Also what nobody expects: it is for those who wait, and the next who come ask again.
                for answer in _awaited(asked):
                    answer.set_exception(error)
            else:
                for answer in _awaited(asked):
                    answer.set_result(state)


def _awaited(answers: Iterable[asyncio.Future[FileState]]) -> Iterator[asyncio.Future[FileState]]:
    """Those whose callers have not given up meanwhile."""
    return (answer for answer in answers if not answer.done())
