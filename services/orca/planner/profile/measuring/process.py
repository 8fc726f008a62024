"""A measuring process: one rank that times steps on the order of its parent (processes.py), which alone starts it.

    python -m orca.planner.profile.measuring.process SOCKET

As a rank of a worker does, it compiles missing kernels first and then starts again (worker.rank.rank).
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import orjson
import torch

from orca.core.domain.errors import OrcaError
from orca.core.domain.model import ModelInfo, load_model_info
from orca.core.process.gc_freeze import freeze_all
from orca.planner.profile.measuring.links import Links, wait_until
from orca.planner.profile.measuring.points import Point, PointBounds, View, all_points, slots_of
from orca.planner.profile.measuring.process_order import ProcessFacts, ProcessOrder
from orca.planner.profile.measuring.timer import StepTimer
from orca.planner.profile.measuring.views import fewer_layers, view_of
from orca.planner.profile.measuring.weight_bytes import weight_bytes
from orca.worker.models.build import StageModel, load_stage, prepare_kernels
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard
from orca.worker.parallel.tensor_link import TensorLink
from orca.worker.rank.progress_layers import count_progress

_ORDER = b"ORCA_PROFILE_ORDER"
"""Environment variable of a process that has started again: its first order."""


class Measurer:
    """The state of a measuring process: its model, a timer for each view, and its links."""

    def __init__(self, order: ProcessOrder, info: ModelInfo, shard: Shard, device: torch.device) -> None:
        torch.set_num_threads(order.threads)
        torch.set_grad_enabled(False)
        progress = RankProgress()
        tensor = TensorLink(shard.tensor, progress)

        def load(place: Shard) -> StageModel:
            return load_stage(info, place, device=device, group=tensor)

        self._model = model = load(shard)
        count_progress(model, progress)
        bounds = PointBounds(**order.bounds)
        self.points = all_points(bounds, has_fewer=fewer_layers(model) > 0)
        self._links = Links(
            model,
            tensor,
            number=order.number,
            processes=order.processes,
            folder=Path(order.folder),
            sends=bounds.sends,
        )
        views = dict.fromkeys(point.view for point in self.points if not point.is_link)
        self._timers = {
            view: StepTimer(view_of(model, view), slots=slots_of(self.points, view), progress=progress)
            for view in views
        }
        self.facts = ProcessFacts(
            layers=len(model.layers),
            fewer_layers=fewer_layers(model),
            kv_bytes_per_slot=model.kv_bytes_per_slot // len(model.layers),
            weights=weight_bytes(model, load) if order.number == 0 else None,
        )

    def begin(self, point: Point) -> list[list[float]]:
        """Run a point for the first time. Returns: the time of its step; of a link nothing."""
        return [] if point.is_link else [list(self._timers[point.view].begin(point))]

    def repeat(self, point: Point, repeats: int, start_ns: int) -> list[list[float]]:
        """Time a point that has begun. Returns: for each repeat total and computation, or what `Links` returns."""
        if point.view is View.SEND:
            return [[moment] for moment in self._links.message_ns(point, repeats, start_ns)]
        wait_until(start_ns)
        if point.view is View.ALL_REDUCE:
            return [[us, us] for us in self._links.all_reduce_us(point, repeats)]
        timer = self._timers[point.view]
        return [list(timer.again(point)) for _ in range(repeats)]


def main(argv: Sequence[str]) -> None:
    """Obey the parent until it closes its end. Args: argv: the number of the inherited socket."""
    descriptor = int(argv[0])
    connection = Connection(descriptor)
    logging.basicConfig(level=logging.WARNING)
    has_restarted = _ORDER in os.environb
    first = os.environb.pop(_ORDER, None) or connection.recv_bytes()
    try:
        measurer = _prepare(ProcessOrder(**orjson.loads(first)), descriptor, None if has_restarted else first)
        freeze_all()
        connection.send_bytes(orjson.dumps(asdict(measurer.facts)))
        while True:
            order = orjson.loads(connection.recv_bytes())
            point = measurer.points[order["point"]]
            if order["repeats"]:
                times = measurer.repeat(point, order["repeats"], order["start_ns"])
            else:
                times = measurer.begin(point)
            connection.send_bytes(orjson.dumps({"times": times}))
    except EOFError:  # the parent is done
        status = 0
    except Exception as error:
        status = 1
        if not isinstance(error, OrcaError):
            traceback.print_exc()
        connection.send_bytes(orjson.dumps({"kind": type(error).__name__, "error": str(error)}))
    # Not sys.exit: Gloo's threads and sockets do not survive an orderly interpreter exit.
    sys.stderr.flush()
    os._exit(status)


def _prepare(order: ProcessOrder, descriptor: int, first: bytes | None) -> Measurer:
    """Compile missing kernels and load the model. Args: first: the order, unless this process has started again."""
    info = load_model_info(Path(order.model), dtype=order.dtype, quantization=order.quantization)
    ranks = order.bounds["ranks"]
    shard = Shard(rank=order.number % ranks, tensor=ranks)
    device = torch.device(order.device)
    if device.type == "cuda":
        device = torch.device("cuda", order.number % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if prepare_kernels(info, shard, device) and first is not None:
        _start_again(descriptor, first)
    return Measurer(order, info, shard, device)


def _start_again(descriptor: int, first: bytes) -> NoReturn:
    os.set_inheritable(descriptor, True)
    os.execve(sys.executable, sys.orig_argv, os.environb | {_ORDER: first})


if __name__ == "__main__":
    main(sys.argv[1:])
