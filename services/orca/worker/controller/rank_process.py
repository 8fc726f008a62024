"""A rank as its controller sees it: a child process and its socket of frames."""

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
from orca.worker.controller.failure_cause import FailureCause, cause_of_death, out_of_memory_kills
from orca.worker.controller.rank_state import RankState
from orca.worker.machine import thread_variables
from orca.worker.messages import frames
from orca.worker.messages.frames import JoinOrder, LoadReport, RankFrameKind, RankHeartbeat
from orca.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

RANK_COMMAND = (sys.executable, "-m", "orca.core.process.gc_freeze", "orca.worker.rank.rank")


class RankProcess:
    """One life of a rank process. A restarted rank is another object."""

    def __init__(
        self,
        rank: int,
        clock: Callable[[], float],
        on_result: Callable[[bytes], None],
        on_broken: Callable[[int, str, FailureCause], None],
        on_death: Callable[["RankProcess", str, FailureCause], None],
        cpu_time_s: Callable[[int | None], float] = cpu_time_s,
    ) -> None:
        """
        Args:
            clock: seconds by which silence is counted.
            on_result: gets ResultMessage bytes.
            on_broken: gets the number of an epoch, the reason why the rank can run no more of its steps, and the cause;
                the rank can join another epoch.
            on_death: gets this object, how the process ended, and the cause.
            cpu_time_s: returns the processor time of the process with a pid.
        """
        self.rank = rank
        self.state = RankState(clock, lambda: cpu_time_s(self.pid))
        self.has_joined = False  # it was ordered into an epoch
        self._on_result = on_result
        self._on_broken = on_broken
        self._on_death = on_death
        self._kill_reason: str | None = None  # why the controller kills it
        self._kills_before = out_of_memory_kills()
        self._left: dict[int, asyncio.Future[None]] = {}
        self._joined: dict[int, asyncio.Future[None]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._link: FrameStream[RankFrameKind] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, settings: WorkerSettings, command: Sequence[str] = RANK_COMMAND) -> None:
        """Start the process; it loads at once. Raises: OSError if the machine cannot start another process."""
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
        self._link = FrameStream(ours, RankFrameKind)
        self._reading = asyncio.create_task(self._attend(self._link, self._process))
        self.send(frames.encode_json(RankFrameKind.START, settings=dataclasses.asdict(settings), rank=self.rank))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_being_killed(self) -> bool:
        """Return whether `kill_for` was called."""
        return self._kill_reason is not None

    def send(self, frame: bytes) -> None:
        """Send a frame. Steps are small and few are in flight, so nothing waits for the socket to drain."""
        if self._link is not None:
            self._link.write(frame)

    async def give_link(self, epoch: int, link: LocalLink) -> None:
        """Let the rank serve a master's link. Raises: OSError if the process is gone."""
        if self._link is None:
            raise OSError("the rank has not begun")
        connection, arrived = link.stop()
        await self._link.write_with_socket(frames.encode_link(epoch, arrived), connection)

    def order_join(self, order: JoinOrder) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        """Order the rank into an epoch. Returns: futures that end when it has left the old one and joined the new."""
        loop, epoch = asyncio.get_running_loop(), order.epoch
        self._left[epoch], self._joined[epoch] = loop.create_future(), loop.create_future()
        # on_broken or on_death reports each failure, so one that nobody waits for needs no warning by asyncio.
        for future in (self._left[epoch], self._joined[epoch]):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.has_joined = True
        self.send(frames.encode_record(RankFrameKind.JOIN, order))
        return self._left[epoch], self._joined[epoch]

    async def stop(self, grace_s: float) -> None:
        """Ask the rank to end; kill it if it has not after `grace_s`."""
        self.send(encode(RankFrameKind.STOP, b""))
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                await self.kill()
        if self._reading is not None:
            await self._reading

    def kill_for(self, reason: str) -> None:
        """Kill the process without waiting for its death, which on_death reports with the reason."""
        self._kill_reason = f"rank {self.rank} {reason}"
        self._send_kill()

    async def kill(self) -> None:
        """Kill the process and wait for its death."""
        self._send_kill()
        if self._process is not None:
            await self._process.wait()

    def _send_kill(self) -> None:
        self.state.forget_load()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _attend(self, link: FrameStream[RankFrameKind], process: asyncio.subprocess.Process) -> None:
        """Read all frames of the rank, and report its death: nobody else would start it again."""
        try:
            await self._read(link)
        except Exception as error:
            log.exception("a frame of a rank could not be handled", extra={"rank": self.rank, "pid": self.pid})
            self.kill_for(f"sent a frame that could not be handled: {type(error).__name__}: {error}")
        self.state.forget_load()
        link.close()
        status = await process.wait()
        ending = f"rank {self.rank} ended with status {status}, last heard doing: {self.state.heartbeat.doing}"
        detail = self._kill_reason or ending
        for epoch in (*self._left, *self._joined):
            self._fail(epoch, detail)
        if self._kill_reason is None:
            cause = cause_of_death(status, was_out_of_memory=out_of_memory_kills() > self._kills_before)
        else:
            cause = FailureCause.INSIDE
        self._on_death(self, detail, cause)

    async def _read(self, link: FrameStream[RankFrameKind]) -> None:
        async for kind, payload in link.frames():
            self.state.note_frame()
            if kind is RankFrameKind.RESULT:
                self._on_result(payload)
            elif kind is RankFrameKind.REFUSED:
                self.state.refusal = payload.decode()
            else:
                self._take_report(kind, orjson.loads(payload))

    def _take_report(self, kind: RankFrameKind, report: dict[str, Any]) -> None:
        if kind is RankFrameKind.HEARTBEAT:
            self.state.note_heartbeat(RankHeartbeat(**report))
        elif kind is RankFrameKind.LOADED:
            self.state.note_loaded(LoadReport(**report))
        elif kind is RankFrameKind.LEFT:
            _resolve(self._left.pop(report["epoch"], None))
        elif kind is RankFrameKind.JOINED:
            _resolve(self._joined.pop(report["epoch"], None))
        elif kind is RankFrameKind.BROKEN:
            detail = f"rank {self.rank}: {report['detail']}"
            self._fail(report["epoch"], detail)
            self._on_broken(report["epoch"], detail, FailureCause.LINK if report["is_link"] else FailureCause.INSIDE)

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
        # Without the "=", NCCL takes every interface whose name begins so.
        variables["NCCL_SOCKET_IFNAME"] = f"={settings.network_interface}"
    return variables
