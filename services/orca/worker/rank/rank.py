"""A rank process: one device's part of one stage. Started by its controller only.

Where its kernels were never compiled on this machine it compiles them, and begins again as the same process: then its
code is that of all later ones (kernels/cpu/team/code.py, `has_compiled`).

Main thread: loads its slice of the weights, then computes. A reader thread takes frames from the controller, so that an
order to leave an epoch, or the controller's death, is seen while the main thread computes or waits for a peer. A third
thread sends the heartbeat, and a fourth reads the master's link where this rank is the whole group (master_link.py).
"""

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import orjson
import torch

from orca.core.domain.errors import EngineError, ModelError, SettingError
from orca.core.domain.model import load_model_info
from orca.core.process.logs import configure_logging
from orca.core.transport import wire
from orca.core.transport.certificates import Certificates
from orca.core.transport.frame_socket import FrameSocket
from orca.core.transport.frame_stream import encode
from orca.worker.messages import frames
from orca.worker.messages.frames import Beat, JoinOrder, Kind, Loaded
from orca.worker.messages.inbox import Inbox
from orca.worker.messages.master_link import MasterLink
from orca.worker.models.build import StageModel, load_stage, prepare_kernels
from orca.worker.parallel.process_groups import Groups, RendezvousStore, TensorLink
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard
from orca.worker.rank.epoch_steps import EpochSteps
from orca.worker.rank.executor import Executor
from orca.worker.rank.kv_slots import slots_possible
from orca.worker.rank.progress_layers import count_progress
from orca.worker.rank.stage_log import StageLog
from orca.worker.settings import WorkerSettings
from orca.worker.stage.stage import Stage

log = logging.getLogger(__name__)

_BEAT_S = 0.5
_START = b"ORCA_RANK_START"
"""Variable of a process that has begun again: what its controller said first."""


class Rank:
    """The process's main loop."""

    def __init__(
        self, frame_socket: FrameSocket[Kind], settings: WorkerSettings, rank: int, progress: RankProgress
    ) -> None:
        self._socket = frame_socket
        self._settings = settings
        self._shard = Shard(stage=settings.stage, stages=settings.stages, rank=rank, tensor=settings.tensor)
        self._device = _device_of(settings, rank)
        self._progress = progress
        self._tensor = TensorLink(settings.tensor, progress)
        self._inbox = Inbox()
        self._epoch = 0  # of the group that this rank is in, 0 when in none
        self._newest_epoch = 0  # of the newest join order seen by the reader thread
        self._store: RendezvousStore | None = None
        self._groups: Groups | None = None
        self._steps: EpochSteps | None = None
        self._stage: Stage | None = None
        self._master: MasterLink | None = None  # of the newest epoch; None: the controller passes steps and results on
        path = settings.iteration_log
        self._log = StageLog(Path(path)) if path is not None and rank == 0 else None

    def prepare(self) -> bool:
        """Compile what is missing of the kernels, before anything of the model is read.

        Returns: whether the process had better begin again (Kernels.prepare).
        """
        settings = self._settings
        self._socket.write(frames.encode_record(Kind.BEAT, Beat(doing="finds kernels, or compiles them once")))
        self._info = load_model_info(
            Path(settings.model),
            dtype=settings.dtype,
            quantization=settings.quantization,
            max_model_len=settings.max_model_len,
        )
        return prepare_kernels(self._info, self._shard, self._device)

    def run(self) -> None:
        """Load, then obey the controller until it says stop. Behind `prepare`."""
        self._progress.at("reads weights")
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        model = self._load()
        self._progress.at("idle", is_waiting=True)
        while True:
            if self._steps and not self._is_leaving:
                self._run_next()
                continue
            kind, payload = self._inbox.next()
            if kind is Kind.STOP:
                self._leave()
                if self._log is not None:
                    self._log.close()
                return
            if kind is Kind.JOIN:
                self._join(JoinOrder(**orjson.loads(payload)), model)
            elif kind is Kind.STEP and self._steps is not None:
                self._take(payload)

    def _load(self) -> StageModel:
        settings = self._settings
        torch.set_num_threads(settings.threads_per_rank)
        torch.set_grad_enabled(False)
        info = self._info
        model = load_stage(info, self._shard, device=self._device, group=self._tensor, on_progress=self._progress.read)
        count_progress(model, self._progress)
        loaded = Loaded(
            revision=info.revision,
            max_model_len=info.max_model_len,
            weight_bytes=model.weight_bytes,
            slots_possible=slots_possible(settings, model, self._device),
        )
        self._socket.write(frames.encode_record(Kind.LOADED, loaded))
        return model

    # Neither keeps the steps in a variable: they hold links of the epoch, which must close while it breaks.

    def _take(self, payload: bytes) -> None:
        assert self._steps is not None
        try:
            self._steps.receive(payload)
        except Exception as error:
            self._break(error)

    def _run_next(self) -> None:
        assert self._steps is not None
        try:
            for result in self._steps.run_next():
                self._answer(wire.result_to_wire(result).SerializeToString())
        except Exception as error:
            self._break(error)

    def _answer(self, result: bytes) -> None:
        master = self._master
        if master is None:
            self._socket.write(encode(Kind.RESULT, result))
        else:
            master.send(result)

    @property
    def _is_leaving(self) -> bool:
        return self._newest_epoch > self._epoch

    def _join(self, order: JoinOrder, model: StageModel) -> None:
        if order.epoch <= self._epoch:
            return  # it came late: this rank is past that epoch
        self._leave()
        self._send(Kind.LEFT, epoch=order.epoch)
        if order.epoch < self._newest_epoch:
            return  # a newer order waits behind this one
        self._epoch = order.epoch
        self._progress.at(f"forms epoch {order.epoch}", is_waiting=True)
        try:
            self._form(order, model)
        except Exception as error:
            self._break(error)
            return
        self._progress.at("idle", is_waiting=True)
        self._send(Kind.JOINED, epoch=order.epoch)

    def _form(self, order: JoinOrder, model: StageModel) -> None:
        """Meet the other ranks under the epoch's keys, with an empty stage."""
        settings = self._settings
        stage = Stage(
            model,
            slots=order.slots,
            block_tokens=order.block_tokens,
            eos_token_ids=self._info.eos_token_ids,
            feeds_tokens=order.feeds_tokens,
        )
        self._store = RendezvousStore(order.rendezvous, order.timeout_s, Certificates.of(self._settings))
        if self._newest_epoch > order.epoch:  # the reader thread may have come before there was a store to close
            raise EngineError("a newer epoch was ordered")
        self._groups = Groups(
            self._shard,
            self._device,
            uses_nccl=settings.uses_nccl,
            data_host=settings.data_host,
            interface=settings.network_interface,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            progress=self._progress,
        )
        self._groups.form(
            self._store,
            order.prefix,
            self._tensor,
            feeds_tokens=order.feeds_tokens,
            timeout_s=order.timeout_s,
        )
        self._stage = stage
        executor = Executor(
            self._shard,
            stage,
            self._groups,
            feeds_tokens=order.feeds_tokens,
            progress=self._progress,
            iteration_log=self._log,
            delay_ms=settings.delay_ms,
        )
        self._steps = EpochSteps(order.epoch, executor, self._inbox)

    def _leave(self) -> None:
        self._steps = None
        self._stage = None
        if self._groups is not None:
            self._groups.leave(self._tensor)
            self._groups = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def _break(self, error: Exception) -> None:
        """The epoch is over for this rank: close its links, so that its peers know too, and wait for the next join."""
        epoch = self._epoch
        is_wanted = self._is_leaving
        doing, is_link = self._progress.doing, self._progress.is_waiting
        reason = f"{type(error).__name__}: {error}"
        # In an epoch that is not formed yet the reason may be this rank's own: an address, or memory for its slots.
        is_peers = is_link and self._steps is not None
        if is_peers and not is_wanted:
            fields = {"epoch": epoch, "doing": doing, "reason": reason.partition("\n")[0]}
            log.warning("another rank is gone, the group forms anew", extra=fields)
        # Frames of the traceback hold tensors and works of the dead groups.
        log.log(
            logging.DEBUG if is_wanted or is_peers else logging.ERROR,
            "the epoch broke",
            extra={"epoch": epoch, "doing": doing, "exception_text": traceback.format_exc()},
        )
        error.__traceback__ = None
        self._leave()
        self._progress.at("broken", is_waiting=True)
        if not is_wanted:
            self._send(Kind.BROKEN, epoch=epoch, detail=f"{doing}: {reason}", is_link=is_link)
            # Behind the word to the controller, which the master will ask for the cause.
            self._hang_up(f"rank {self._shard.rank}: {doing}: {reason}")

    def _read(self) -> None:
        """Reader thread. Deaf, with a heart that beats, this process would hold its place in vain: so it ends."""
        try:
            self._read_all()
        except Exception:
            log.exception("the controller was not understood")
        os._exit(1)

    def _read_all(self) -> None:
        """Frames into the inbox, until the controller is gone; what cannot wait for the main thread is done here."""
        while (frame := self._socket.read()) is not None:
            kind, payload = frame
            if kind is Kind.LINK:
                self._take_link(*frames.decode_link(payload))
                continue
            if kind is Kind.JOIN:
                self._hear_of(int(orjson.loads(payload)["epoch"]))
            elif kind is Kind.STOP:
                self._hang_up("the stage stops")
            self._inbox.put(frame)

    def _take_link(self, epoch: int, arrived: bytes) -> None:
        try:
            connection = self._socket.take_socket()
        except OSError as error:
            self._send(Kind.BROKEN, epoch=epoch, detail=str(error), is_link=False)
            return
        if epoch != self._newest_epoch or self._steps is None or self._master is not None:
            connection.close()  # it came late, behind a newer order or the epoch's end, or is a second one
            return
        self._master = MasterLink(connection, epoch, arrived, self._inbox)
        self._master.start()

    def _hang_up(self, reason: str) -> None:
        """On the master, if it has a link, which drops what it is given from now on. Wakes the main thread where that
        waits for the master to read."""
        master = self._master
        if master is not None:
            master.end(reason)

    def _hear_of(self, epoch: int) -> None:
        if epoch <= self._newest_epoch:
            return  # the order came late, behind that of a newer epoch
        self._newest_epoch = epoch
        self._hang_up(f"epoch {epoch} begins")
        self._master = None
        store = self._store
        if store is not None:
            store.close()  # wakes the main thread if it is still forming an older epoch

    def _beat(self) -> None:
        while True:
            stage, progress = self._stage, self._progress
            beat = Beat(
                mark=progress.mark,
                doing=progress.doing,
                is_waiting=progress.is_waiting,
                units=progress.units,
                loaded_permille=progress.loaded_permille,
                slots_in_use=0 if stage is None else stage.slots_in_use,
            )
            self._socket.write(frames.encode_record(Kind.BEAT, beat))
            time.sleep(_BEAT_S)

    def _send(self, kind: Kind, **fields: Any) -> None:
        self._socket.write(frames.encode_json(kind, **fields))


def _device_of(settings: WorkerSettings, rank: int) -> torch.device:
    if settings.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    return torch.device(settings.device)


def main(argv: Sequence[str]) -> None:
    """Entry of the process. Args: argv: the number of the inherited socket."""
    descriptor = int(argv[0])
    frame_socket = FrameSocket(socket.socket(fileno=descriptor), Kind, takes_sockets=True)
    again = os.environb.pop(_START, None)
    said = again or _first_word(frame_socket)
    start = orjson.loads(said)
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
            if again is None:
                _begin_again(descriptor, said)
            log.warning(
                "kernels were compiled and not found again: bfloat16 may be rounded otherwise by later processes"
            )
        rank.run()
    except (ModelError, SettingError) as error:
        frame_socket.write(encode(Kind.REFUSED, str(error).encode()))
        status = 1
    except Exception as error:
        log.exception("the rank ends")
        # The last thing the controller hears becomes its word on how this process died.
        progress.at(f"{type(error).__name__}: {error}")
        frame_socket.write(frames.encode_record(Kind.BEAT, Beat(mark=progress.mark, doing=progress.doing)))
        status = 1
    logging.shutdown()
    # Not sys.exit: Gloo's threads and sockets of a broken epoch do not survive an orderly interpreter exit.
    os._exit(status)


def _first_word(frame_socket: FrameSocket[Kind]) -> bytes:
    first = frame_socket.read()
    if first is None or first[0] is not Kind.START:
        os._exit(1)
    return first[1]


def _begin_again(descriptor: int, start: bytes) -> NoReturn:
    """This process anew. An order to stop that has come right behind the start may be lost: then it is killed."""
    log.info("kernels are compiled, the process begins again and finds them kept")
    logging.shutdown()
    os.set_inheritable(descriptor, True)
    os.execve(sys.executable, sys.orig_argv, os.environb | {_START: start})
