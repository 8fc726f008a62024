"""A rank process: one device's part of one stage. Only its controller starts it.

If its kernels were never compiled on this machine, it compiles them and starts again as the same process. So its code
is that of all later processes (kernels/cpu/team/code.py, `has_compiled`).

The main thread loads its slice of the weights, then computes. A reader thread takes frames from the controller, also
while the main thread computes or waits for a peer. So it sees an order to leave an epoch, or the controller's death. A
third thread sends the heartbeat. A fourth one reads the master's link if this rank is the whole group (master_link.py).
"""

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import orjson
import torch

from orca.core.domain.errors import ModelError, SettingError
from orca.core.domain.model import load_model_info
from orca.core.process.logs import configure_logging
from orca.core.transport import wire
from orca.core.transport.frame_socket import FrameSocket
from orca.core.transport.frame_stream import encode
from orca.worker.messages import frames
from orca.worker.messages.frames import JoinOrder, LoadReport, RankFrameKind, RankHeartbeat
from orca.worker.messages.inbox import Inbox
from orca.worker.messages.master_link import MasterLink
from orca.worker.models.build import StageModel, load_stage, prepare_kernels
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard
from orca.worker.parallel.stage_layers import read_layers
from orca.worker.parallel.tensor_link import TensorLink
from orca.worker.rank.kv_slots import slots_possible
from orca.worker.rank.progress_layers import count_progress
from orca.worker.rank.rank_epoch import RankEpoch
from orca.worker.rank.stage_log import StageLog
from orca.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.5
_START = b"ORCA_RANK_START"
"""Environment variable of a process that has started again: the first frame of its controller."""


class Rank:
    """The process's main loop and its threads.

    The class is long but one idea: the state that its threads share. Each part of that state has one writer.
    """

    def __init__(
        self, frame_socket: FrameSocket[RankFrameKind], settings: WorkerSettings, rank: int, progress: RankProgress
    ) -> None:
        self._socket = frame_socket
        self._settings = settings
        self._shard = Shard(stage=settings.stage, stages=settings.stages, rank=rank, tensor=settings.tensor)
        self._device = _device_of(settings, rank)
        self._progress = progress
        self._tensor = TensorLink(settings.tensor, progress)
        self._inbox = Inbox()
        self._epoch = 0  # number of the last epoch that this rank formed or tried to form
        self._newest_epoch = 0  # number of the newest join order that the reader thread has seen
        self._current = self._empty_epoch()
        self._master: MasterLink | None = None  # of the newest epoch; None: steps and results go by the controller
        path = settings.iteration_log
        self._log = StageLog(Path(path)) if path is not None and rank == 0 else None

    def prepare(self) -> bool:
        """Compile missing kernels, before anything of the model is read.

        Returns: whether the process should start again (Kernels.prepare).
        Raises: ModelError for a model that cannot be served, BadValue if `--layers` does not divide its layers.
        """
        settings = self._settings
        self._send(RankFrameKind.HEARTBEAT, RankHeartbeat(doing="finds kernels, or compiles them once"))
        self._info = load_model_info(
            Path(settings.model),
            dtype=settings.dtype,
            quantization=settings.quantization,
            max_model_len=settings.max_model_len,
        )
        if settings.layers is not None:
            counts = read_layers(settings.layers, stages=settings.stages, num_layers=self._info.num_layers)
            self._shard = replace(self._shard, layer_counts=counts)
        return prepare_kernels(self._info, self._shard, self._device)

    def run(self) -> None:
        """Load the model, then obey the controller until it orders a stop. Call it after `prepare`."""
        self._progress.at("reads weights")
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()
        model = self._load()
        self._progress.at("idle", is_waiting=True)
        while True:
            if self._current.steps and not self._is_leaving:
                self._run_next()
                continue
            kind, payload = self._inbox.next()
            if kind is RankFrameKind.STOP:
                self._current.leave()
                if self._log is not None:
                    self._log.close()
                return
            if kind is RankFrameKind.JOIN:
                self._join(JoinOrder(**orjson.loads(payload)), model)
            elif kind is RankFrameKind.STEP and self._current.steps is not None:
                self._receive(payload)

    def _load(self) -> StageModel:
        settings = self._settings
        torch.set_num_threads(settings.threads_per_rank)
        torch.set_grad_enabled(False)
        info = self._info
        model = load_stage(info, self._shard, device=self._device, group=self._tensor, on_progress=self._progress.read)
        count_progress(model, self._progress)
        report = LoadReport(
            revision=info.revision,
            max_model_len=info.max_model_len,
            weight_bytes=model.weight_bytes,
            slots_possible=slots_possible(settings, model, self._device),
        )
        self._send(RankFrameKind.LOADED, report)
        return model

    # Neither method keeps the steps in a variable: they hold links of the epoch, which must close when it breaks.

    def _receive(self, payload: bytes) -> None:
        assert self._current.steps is not None
        try:
            self._current.steps.receive(payload)
        except Exception as error:
            self._break(error)

    def _run_next(self) -> None:
        assert self._current.steps is not None
        try:
            for result in self._current.steps.run_next():
                encoded = wire.result_to_wire(result).SerializeToString()
                master = self._master
                if master is None:
                    self._socket.write(encode(RankFrameKind.RESULT, encoded))
                else:
                    master.send(encoded)
        except Exception as error:
            self._break(error)

    @property
    def _is_leaving(self) -> bool:
        return self._newest_epoch > self._epoch

    def _join(self, order: JoinOrder, model: StageModel) -> None:
        if order.epoch <= self._epoch:
            return  # it came late: this rank is past that epoch
        self._current.leave()
        self._send(RankFrameKind.LEFT, epoch=order.epoch)
        if order.epoch < self._newest_epoch:
            return  # a newer order is in the inbox
        self._epoch = order.epoch
        self._current = self._empty_epoch()
        self._progress.at(f"forms epoch {order.epoch}", is_waiting=True)
        try:
            self._current.form(
                order, model, inbox=self._inbox, iteration_log=self._log, is_outdated=lambda: self._is_leaving
            )
        except Exception as error:
            self._break(error)
            return
        self._progress.at("idle", is_waiting=True)
        self._send(RankFrameKind.JOINED, epoch=order.epoch)

    def _break(self, error: Exception) -> None:
        """End the epoch on this rank: close its links, so that its peers notice, and wait for the next join."""
        epoch = self._epoch
        is_wanted = self._is_leaving
        doing, is_link = self._progress.doing, self._progress.is_waiting
        reason = f"{type(error).__name__}: {error}"
        # While an epoch is being formed the cause may be this rank's own: an address, or memory for its slots.
        is_peers = is_link and self._current.steps is not None
        if is_peers and not is_wanted:
            fields = {"epoch": epoch, "doing": doing, "reason": reason.partition("\n")[0]}
            log.warning("another rank is gone, the group forms again", extra=fields)
        # Frames of the traceback hold tensors and sends of the dead groups.
        log.log(
            logging.DEBUG if is_wanted or is_peers else logging.ERROR,
            "the epoch broke",
            extra={"epoch": epoch, "doing": doing, "exception_text": traceback.format_exc()},
        )
        error.__traceback__ = None
        self._current.leave()
        self._progress.at("broken", is_waiting=True)
        if not is_wanted:
            self._send(RankFrameKind.BROKEN, epoch=epoch, detail=f"{doing}: {reason}", is_link=is_link)
            # After the report to the controller, because the master will ask the controller for the cause.
            self._end_master_link(f"rank {self._shard.rank}: {doing}: {reason}")

    def _read(self) -> None:
        """Read frames into the inbox until the controller is gone. Handle here those that cannot wait.

        If this thread ends, the process exits: heartbeats alone would look healthy.
        """
        try:
            while (frame := self._socket.read()) is not None:
                kind, payload = frame
                if kind is RankFrameKind.LINK:
                    self._take_link(*frames.decode_link(payload))
                    continue
                if kind is RankFrameKind.JOIN:
                    self._note_epoch(int(orjson.loads(payload)["epoch"]))
                elif kind is RankFrameKind.STOP:
                    self._end_master_link("the stage stops")
                self._inbox.put(frame)
        except Exception:
            log.exception("a frame of the controller could not be handled")
        os._exit(1)

    def _take_link(self, epoch: int, arrived: bytes) -> None:
        try:
            connection = self._socket.take_socket()
        except OSError as error:
            self._send(RankFrameKind.BROKEN, epoch=epoch, detail=str(error), is_link=False)
            return
        if epoch != self._newest_epoch or self._current.steps is None or self._master is not None:
            connection.close()  # it came after a newer order or the epoch's end, or it is a second one
            return
        self._master = MasterLink(connection, epoch, arrived, self._inbox)
        self._master.start()

    def _end_master_link(self, reason: str) -> None:
        """End the master's link, if there is one. Wakes the main thread if that waits for the master to read."""
        master = self._master
        if master is not None:
            master.end(reason)

    def _note_epoch(self, epoch: int) -> None:
        if epoch <= self._newest_epoch:
            return  # the order came late, after that of a newer epoch
        self._newest_epoch = epoch
        self._end_master_link(f"epoch {epoch} begins")
        self._master = None
        self._current.interrupt()

    def _send_heartbeats(self) -> None:
        while True:
            progress = self._progress
            heartbeat = RankHeartbeat(
                mark=progress.mark,
                doing=progress.doing,
                is_waiting=progress.is_waiting,
                units=progress.units,
                loaded_permille=progress.loaded_permille,
                slots_in_use=self._current.slots_in_use,
            )
            self._send(RankFrameKind.HEARTBEAT, heartbeat)
            time.sleep(_HEARTBEAT_S)

    def _send(self, kind: RankFrameKind, record: LoadReport | RankHeartbeat | None = None, **fields: Any) -> None:
        frame = frames.encode_json(kind, **fields) if record is None else frames.encode_record(kind, record)
        self._socket.write(frame)

    def _empty_epoch(self) -> RankEpoch:
        return RankEpoch(self._settings, self._shard, self._device, tensor=self._tensor, progress=self._progress)


def _device_of(settings: WorkerSettings, rank: int) -> torch.device:
    if settings.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    return torch.device(settings.device)


def main(argv: Sequence[str]) -> None:
    """Run the process. Args: argv: the number of the inherited socket."""
    descriptor = int(argv[0])
    frame_socket = FrameSocket(socket.socket(fileno=descriptor), RankFrameKind, takes_sockets=True)
    has_restarted = _START in os.environb
    first = os.environb.pop(_START, None) or _first_payload(frame_socket)
    start = orjson.loads(first)
    settings = WorkerSettings(**start["settings"])
    configure_logging(
        f"worker-{settings.stage}-rank-{start['rank']}",
        fmt=settings.log_format,  # type: ignore[arg-type]
        level=settings.log_level.upper(),
    )
    status = 0
    progress = RankProgress()
    try:
        rank = Rank(frame_socket, settings, start["rank"], progress)
        if rank.prepare():
            if not has_restarted:
                _start_again(descriptor, first)
            log.warning(
                "kernels were compiled but not found after the restart: later processes may round bfloat16 differently"
            )
        rank.run()
    except (ModelError, SettingError) as error:
        frame_socket.write(encode(RankFrameKind.REFUSED, str(error).encode()))
        status = 1
    except Exception as error:
        log.exception("the rank ends")
        # The controller reports the last heartbeat as what this process did when it died.
        progress.at(f"{type(error).__name__}: {error}")
        last = RankHeartbeat(mark=progress.mark, doing=progress.doing)
        frame_socket.write(frames.encode_record(RankFrameKind.HEARTBEAT, last))
        status = 1
    logging.shutdown()
    # Not sys.exit: Gloo's threads and sockets of a broken epoch do not survive an orderly interpreter exit.
    os._exit(status)


def _first_payload(frame_socket: FrameSocket[RankFrameKind]) -> bytes:
    first = frame_socket.read()
    if first is None or first[0] is not RankFrameKind.START:
        os._exit(1)
    return first[1]


def _start_again(descriptor: int, start: bytes) -> NoReturn:
    """Start this process again. A stop order that came right after the start may be lost; then the rank is killed."""
    log.info("kernels are compiled, the process starts again and loads them from the cache")
    logging.shutdown()
    os.set_inheritable(descriptor, True)
    os.execve(sys.executable, sys.orig_argv, os.environb | {_START: start})
