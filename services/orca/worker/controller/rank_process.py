"""A rank as its controller sees it: a child process, its socket of frames, and what it last said of itself."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from orca.core.domain.errors import EngineError
from orca.core.process.cpu_time import cpu_time_s
from orca.core.process.parent_death import die_with_parent
from orca.core.transport.frame_stream import FrameStream, encode
from orca.core.transport.local_link import LocalLink
from orca.worker.controller.failure_cause import Cause, cause_of_death, out_of_memory_kills
from orca.worker.controller.liveness import Signs
from orca.worker.machine import thread_variables
from orca.worker.messages import frames
from orca.worker.messages.frames import Beat, JoinOrder, Kind, Loaded
from orca.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

RANK_COMMAND = (sys.executable, "-m", "orca.core.process.gc_freeze", "orca.worker.rank.rank")

_COMPUTED_S = 0.5
"""Processor time that counts as a move while a rank loads: far more than its heartbeat takes in a minute."""


class RankProcess:
    """One life of a rank process. A restarted rank is another object."""

    def __init__(
        self,
        rank: int,
        clock: Callable[[], float],
        on_result: Callable[[bytes], None],
        on_broken: Callable[[int, str, Cause], None],
        on_death: Callable[["RankProcess", str, Cause], None],
        cpu_time_s: Callable[[int | None], float] = cpu_time_s,
    ) -> None:
        """
        Args:
            clock: seconds by which silence is counted.
            on_result: gets ResultMessage bytes.
            on_broken: gets the epoch's number and why the rank can run no more of its steps; it can join another.
            on_death: gets this object, how the process ended and whose doing that was.
            cpu_time_s: what the process with a pid has computed so far.
        """
        self.rank = rank
        self.loaded: Loaded | None = None  # None again when the process is gone
        self.loaded_event = asyncio.Event()
        self.refusal: str | None = None  # why this model or these settings can never be served
        self.beat = Beat()  # the latest
        self.joined_once = False
        self._clock = clock
        self._on_result = on_result
        self._on_broken = on_broken
        self._on_death = on_death
        self._heard = self._moved = clock()  # when it was last heard, and when its work last got on
        self._computed_s = 0.0  # processor time when that was last taken for a move
        self._cpu_time_s = cpu_time_s
        self._condemned: str | None = None  # why the controller kills it
        self._kills_before = out_of_memory_kills()
        self._left: dict[int, asyncio.Future[None]] = {}
        self._joined: dict[int, asyncio.Future[None]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._link: FrameStream[Kind] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, settings: WorkerSettings, command: Sequence[str] = RANK_COMMAND) -> None:
        """Start the process; it loads at once. Raises: OSError when the machine has no room for one."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent([*command, str(theirs.fileno())]),
                pass_fds=(theirs.fileno(),),
                # Ctrl-C and the like reach the controller only, which then ends its ranks.
                start_new_session=True,
                env=os.environ | _variables(settings),
            )
            undo.pop_all()
        self._link = FrameStream(ours, Kind)
        self._reading = asyncio.create_task(self._attend(self._link, self._process))
        self.send(frames.encode_json(Kind.START, settings=dataclasses.asdict(settings), rank=self.rank))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def loaded_permille(self) -> int:
        """Share of the weights that the process holds."""
        return self.beat.loaded_permille if self.loaded is None else 1000

    @property
    def signs(self) -> Signs:
        """Its signs of life as of now."""
        now = self._clock()
        if self.loaded is None:
            self._look_at_processor_time(now)
        return Signs(
            is_loaded=self.loaded is not None,
            silent_s=now - self._heard,
            still_s=now - self._moved,
            is_waiting=self.beat.is_waiting,
            units=self.beat.units,
            doing=self.beat.doing,
        )

    @property
    def is_condemned(self) -> bool:
        return self._condemned is not None

    def send(self, frame: bytes) -> None:
        """Hand a frame over. Steps are small and few are in flight, so nothing waits for the socket to drain."""
        if self._link is not None:
            self._link.write(frame)

    async def give_link(self, epoch: int, link: LocalLink) -> None:
        """Let the rank serve a master's link. Raises: OSError when the process is gone."""
        if self._link is None:
            raise OSError("the rank has not begun")
        connection, arrived = link.stop()
        await self._link.write_with_socket(frames.encode_link(epoch, arrived), connection)

    def order_join(self, order: JoinOrder) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        """Send the rank into an epoch. Returns: a future each for having left the old one and having joined the new."""
        loop, epoch = asyncio.get_running_loop(), order.epoch
        self._left[epoch], self._joined[epoch] = loop.create_future(), loop.create_future()
        # A failure that nobody waits for any more has been told through on_broken or on_death already.
        for future in (self._left[epoch], self._joined[epoch]):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.joined_once = True
        self.send(frames.encode_record(Kind.JOIN, order))
        return self._left[epoch], self._joined[epoch]

    async def stop(self, grace_s: float) -> None:
        """Ask the rank to end; kill it when it has not after `grace_s`."""
        self.send(encode(Kind.STOP, b""))
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                await self.kill()
        if self._reading is not None:
            await self._reading

    def condemn(self, reason: str) -> None:
        """Kill the process for `reason`, without waiting for its death: on_death tells of that, with the reason."""
        self._condemned = f"rank {self.rank} {reason}"
        self._forget_load()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def kill(self) -> None:
        self._forget_load()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _attend(self, link: FrameStream[Kind], process: asyncio.subprocess.Process) -> None:
        """Hear the rank out, whatever it says, and tell of its death: nobody else would start it again."""
        try:
            await self._read(link)
        except Exception as error:
            log.exception("a rank was not understood", extra={"rank": self.rank, "pid": self.pid})
            self.condemn(f"was not understood: {type(error).__name__}: {error}")
        self._forget_load()
        link.close()
        status = await process.wait()
        ending = f"rank {self.rank} ended with status {status}, last heard doing: {self.beat.doing}"
        detail = self._condemned or ending
        for epoch in (*self._left, *self._joined):
            self._fail(epoch, detail)
        self._on_death(self, detail, self._cause_of_death(status))

    async def _read(self, link: FrameStream[Kind]) -> None:
        async for kind, payload in link.frames():
            self._heard = self._clock()
            if kind is Kind.RESULT:
                self._on_result(payload)
            elif kind is Kind.REFUSED:
                self.refusal = payload.decode()
            else:
                self._note(kind, orjson.loads(payload))

    def _note(self, kind: Kind, said: dict[str, Any]) -> None:
        if kind is Kind.BEAT:
            beat = Beat(**said)
            if beat.mark != self.beat.mark:
                self._moved = self._heard
            self.beat = beat
        elif kind is Kind.LOADED:
            self.loaded = Loaded(**said)
            self._moved = self._heard
            self.loaded_event.set()
        elif kind is Kind.LEFT:
            _resolve(self._left.pop(said["epoch"], None))
        elif kind is Kind.JOINED:
            _resolve(self._joined.pop(said["epoch"], None))
        elif kind is Kind.BROKEN:
            detail = f"rank {self.rank}: {said['detail']}"
            self._fail(said["epoch"], detail)
            self._on_broken(said["epoch"], detail, Cause.LINK if said["is_link"] else Cause.INSIDE)

    def _look_at_processor_time(self, now: float) -> None:
        """A rank that computes gets on, though it has no mark to move yet: on a machine that others keep busy the
        imports alone may take longer than the bound on silence."""
        computed_s = self._cpu_time_s(self.pid)
        if computed_s - self._computed_s >= _COMPUTED_S:
            self._computed_s, self._moved = computed_s, now

    def _cause_of_death(self, status: int) -> Cause:
        if self._condemned is not None:
            return Cause.INSIDE
        return cause_of_death(status, was_out_of_memory=out_of_memory_kills() > self._kills_before)

    def _forget_load(self) -> None:
        self.loaded, self.beat = None, dataclasses.replace(self.beat, loaded_permille=0)

    def _fail(self, epoch: int, detail: str) -> None:
        for waiting in (self._left, self._joined):
            future = waiting.pop(epoch, None)
            if future is not None and not future.done():
                future.set_exception(EngineError(detail))


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _variables(settings: WorkerSettings) -> dict[str, str]:
    variables = thread_variables(settings.threads_per_rank)
    if settings.network_interface is not None:
        variables["NCCL_SOCKET_IFNAME"] = f"={settings.network_interface}"  # else every name that begins so
    return variables
