"""A rank as its controller sees it: a child process, its socket of frames, and what it last said of itself."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from orca.core.errors import EngineError
from orca.core.leash import leashed
from orca.worker import frames
from orca.worker.frames import Kind
from orca.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

RANK_COMMAND = (sys.executable, "-m", "orca.worker.rank")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Payload of a LOADED frame: what a rank holds."""

    revision: str
    max_model_len: int
    weight_bytes: int
    slots_possible: int


class RankProcess:
    """One life of a rank process. A restarted rank is another object."""

    def __init__(
        self,
        rank: int,
        on_result: Callable[[bytes], None],
        on_broken: Callable[[int, str], None],
        on_death: Callable[["RankProcess", str], None],
    ) -> None:
        """
        Args:
            on_result: gets ResultMessage bytes.
            on_broken: gets the epoch's number and why the rank can run no more of its steps; it can join another.
            on_death: gets this object and how the process ended.
        """
        self.rank = rank
        self.loaded: Loaded | None = None  # None again when the process is gone
        self.loaded_event = asyncio.Event()
        self.refusal: str | None = None  # why this model or these settings can never be served
        self.loaded_permille = 0
        self.slots_in_use = 0
        self.doing = "starting"
        self.mark = 0  # rises with every layer: where it stands still, the rank hangs or waits
        self.joined_once = False
        self._on_result = on_result
        self._on_broken = on_broken
        self._on_death = on_death
        self._heard = time.monotonic()
        self._left: dict[int, asyncio.Future[None]] = {}
        self._joined: dict[int, asyncio.Future[None]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, settings: WorkerSettings, command: Sequence[str] = RANK_COMMAND) -> None:
        """Start the process; it loads at once. Raises: OSError when the machine has no room for one."""
        ours, theirs = socket.socketpair()
        threads = str(settings.threads_per_rank)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = await asyncio.create_subprocess_exec(
                *leashed([*command, str(theirs.fileno())]),
                pass_fds=(theirs.fileno(),),
                # Ctrl-C and the like reach the controller only, which then ends its ranks.
                start_new_session=True,
                # Read by OpenMP and MKL when torch is imported, which is before any setting could be.
                env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )
            undo.pop_all()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        self.send(frames.encode_json(Kind.START, settings=dataclasses.asdict(settings), rank=self.rank))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def silent_s(self) -> float:
        """Seconds since the rank was last heard of."""
        return time.monotonic() - self._heard

    def send(self, frame: bytes) -> None:
        """Hand a frame over. Steps are small and few are in flight, so nothing waits for the socket to drain."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    def order_join(self, epoch: int, order: dict[str, Any]) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        """Send the rank into an epoch. Returns: a future each for having left the old one and having joined the new."""
        loop = asyncio.get_running_loop()
        self._left[epoch], self._joined[epoch] = loop.create_future(), loop.create_future()
        # A failure that nobody waits for any more has been told through on_broken or on_death already.
        for future in (self._left[epoch], self._joined[epoch]):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.joined_once = True
        self.send(frames.encode_json(Kind.JOIN, epoch=epoch, **order))
        return self._left[epoch], self._joined[epoch]

    async def stop(self, grace_s: float) -> None:
        """Ask the rank to end; kill it when it has not after `grace_s`."""
        self.send(frames.encode(Kind.STOP, b""))
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                await self.kill()
        if self._reading is not None:
            await self._reading

    async def kill(self) -> None:
        self.loaded, self.loaded_permille = None, 0
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for kind, payload in frames.frames(reader):
            self._heard = time.monotonic()
            if kind is Kind.RESULT:
                self._on_result(payload)
            elif kind is Kind.REFUSED:
                self.refusal = payload.decode()
            else:
                self._note(kind, orjson.loads(payload))
        self.loaded, self.loaded_permille = None, 0
        assert self._process is not None
        assert self._writer is not None
        self._writer.close()
        status = await self._process.wait()
        detail = f"rank {self.rank} ended with status {status}, last heard doing: {self.doing}"
        for epoch in (*self._left, *self._joined):
            self._fail(epoch, detail)
        self._on_death(self, detail)

    def _note(self, kind: Kind, said: dict[str, Any]) -> None:
        if kind is Kind.BEAT:
            self.doing, self.mark, self.slots_in_use = said["doing"], said["mark"], said["slots_in_use"]
        elif kind is Kind.LOADING:
            self.loaded_permille = said["permille"]
        elif kind is Kind.LOADED:
            self.loaded, self.loaded_permille = Loaded(**said), 1000
            self.loaded_event.set()
        elif kind is Kind.LEFT:
            _resolve(self._left.pop(said["epoch"], None))
        elif kind is Kind.JOINED:
            _resolve(self._joined.pop(said["epoch"], None))
        elif kind is Kind.BROKEN:
            detail = f"rank {self.rank}: {said['detail']}"
            self._fail(said["epoch"], detail)
            self._on_broken(said["epoch"], detail)

    def _fail(self, epoch: int, detail: str) -> None:
        for waiting in (self._left, self._joined):
            future = waiting.pop(epoch, None)
            if future is not None and not future.done():
                future.set_exception(EngineError(detail))


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
