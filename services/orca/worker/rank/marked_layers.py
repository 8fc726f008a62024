"""Layers that move the progress mark (progress.py) when they have run, also in a recording."""

from torch import Tensor

from orca.kernels.device import Kernels, kernels_of
from orca.worker.models.blocks import Layer, Part, StepContext
from orca.worker.models.build import StageModel
from orca.worker.parallel.progress import Progress


def mark_parts(model: StageModel, progress: Progress) -> None:
    """Have each layer move the progress mark when it has run, and the head, which runs over a prompt in many parts."""
    kernels = kernels_of(model.device)
    model.layers[:] = [_MarkedLayer(layer, progress, kernels) for layer in model.layers]
    if model.head is not None:
        model.head = _Marked(model.head, progress, kernels)


class _Marked:
    def __init__(self, part: Part, progress: Progress, kernels: Kernels) -> None:
        self.only_kernels = part.only_kernels
        self._part, self._progress, self._kernels = part, progress, kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        x = self._part(x, step)
        self._move()
        return x

    def _move(self) -> None:
        self._kernels.increment(self._progress.layers_at)


class _MarkedLayer(_Marked):
    def __init__(self, layer: Layer, progress: Progress, kernels: Kernels) -> None:
        super().__init__(layer, progress, kernels)
        self._layer = layer

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._layer.keep(x, step)
        self._move()
