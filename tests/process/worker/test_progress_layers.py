"""The mark of a rank moves with its layers."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

from orca.bench.parts.stage_processes import new_request
from orca.core.domain.step import Epoch, Row, Step
from orca.kernels.device import kernels_of
from orca.worker.parallel.progress import RankProgress
from orca.worker.rank.progress_layers import count_progress


def step(tokens: int) -> Step:
    row = Row(handle=1, start=0, count=tokens, sample=True)
    return Step(epoch=Epoch(1, "test"), number=1, new=(new_request(1, (1,) * tokens, 1),), rows=(row,))


def test_each_layer_reports_progress_after_it_has_run() -> None:
    progress = RankProgress()
    progress.at("computes")
    mark = progress.mark
    for device in (torch.device("cpu"), torch.device("meta")):
        model: Any = SimpleNamespace(device=device, encoder=None, layers=[Unchanging()], head=None)
        count_progress(model, progress)
        [layer] = model.layers
        with kernels_of(device).deferred():
            layer(torch.zeros(1, 1), Mock())
            layer.keep(torch.zeros(1, 1), Mock())
            assert progress.mark == mark + (0 if device.type == "cpu" else 2)
        mark += 2
        assert progress.mark == mark


class Unchanging:
    """A layer."""

    only_kernels = True

    def __call__(self, x: torch.Tensor, step: object) -> torch.Tensor:  # noqa: ARG002 - the shape of a layer
        return x

    def keep(self, x: torch.Tensor, step: object) -> None: ...
