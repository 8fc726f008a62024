"""The links between the ranks of one measurement, and the time of messages on them."""

import time
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from orca.planner.profile.measuring.points import Point
from orca.worker.models.build import StageModel
from orca.worker.parallel.process_groups import EpochGroups
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard
from orca.worker.parallel.tensor_link import TensorLink

_TIMEOUT_S = 600.0
"""Time limit for meeting the other processes, which may still load their share of the model."""
_GAP_NS = 2_000_000
"""Time between two messages: one must have arrived before the next one leaves."""


class Links:
    """The process groups of one process: its tensor-parallel group, and a pipe from process 0 to process 1.

    Args:
        tensor: the link of the model, which is attached to its group here.
        number: of the process, from 0.
        processes: all that run at the same time.
        folder: where the processes meet.
        sends: there is a pipe.
    """

    def __init__(
        self, model: StageModel, tensor: TensorLink, *, number: int, processes: int, folder: Path, sends: bool
    ) -> None:
        self._model, self._tensor = model, tensor
        self._pipe: EpochGroups | None = None
        self._is_sender = number == 0
        if tensor.size > 1:
            group = number // tensor.size
            store = _meeting(folder / f"tensor{group}", tensor.size)
            self._groups(model.shard).form(store, "", tensor, feeds_tokens=False, timeout_s=_TIMEOUT_S)
        if sends and number < 2 <= processes:
            self._pipe = self._groups(Shard(stage=number, stages=2))
            store = _meeting(folder / "pipe", 2)
            self._pipe.form(store, "", TensorLink(1, RankProgress()), feeds_tokens=False, timeout_s=_TIMEOUT_S)

    def all_reduce_us(self, point: Point, repeats: int) -> list[float]:
        """Return the times of sums over the ranks of a stage."""
        tensor = torch.zeros(point.size // 4, dtype=torch.float32, device=self._model.device)
        times = []
        for _ in range(repeats):
            start_ns = time.monotonic_ns()
            self._tensor.all_reduce(tensor)
            self._synchronize()
            times.append((time.monotonic_ns() - start_ns) / 1000)
        return times

    def message_ns(self, point: Point, repeats: int, start_ns: int) -> list[int]:
        """Send or receive messages. Returns: when each one left, or arrived; nothing on other processes.

        Args: start_ns: when the first one leaves. All processes of a machine have the same clock.
        """
        if self._pipe is None:
            return []
        model = self._model
        rows = max(1, point.size // (model.config.hidden_size * model.dtype.itemsize))
        times = []
        for repeat in range(repeats):
            if not self._is_sender:
                self._pipe.receive_hidden(rows).wait()
                self._synchronize()
                times.append(time.monotonic_ns())
                continue
            hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
            wait_until(start_ns + repeat * _GAP_NS)
            times.append(time.monotonic_ns())
            self._pipe.send_hidden(hidden)
        return times

    def _groups(self, shard: Shard) -> EpochGroups:
        model = self._model
        return EpochGroups(
            shard,
            model.device,
            uses_nccl=model.device.type == "cuda",
            data_host="127.0.0.1",
            interface=None,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            progress=RankProgress(),
        )

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def _meeting(file: Path, processes: int) -> FileStore:
    """Return the store in which so many processes meet."""
    store = FileStore(str(file), processes)
    store.set_timeout(timedelta(seconds=_TIMEOUT_S))
    return store


def wait_until(moment_ns: int) -> None:
    """Wait for a moment of the monotonic clock: asleep, and for the last 0.2 ms awake."""
    while (left_ns := moment_ns - time.monotonic_ns()) > 0:
        if left_ns > 200_000:
            time.sleep((left_ns - 200_000) / 1e9)
