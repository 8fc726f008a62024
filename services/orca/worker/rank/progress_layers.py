"""Layers that count as progress (worker.parallel.progress) when they have run, also in a recording."""

from torch import Tensor

from orca.kernels.device import Kernels, kernels_of
from orca.worker.models.blocks import Layer, ModelPart, StepContext
from orca.worker.models.build import StageModel
from orca.worker.parallel.progress import RankProgress


def count_progress(model: StageModel, progress: RankProgress) -> None:
    """Wrap each layer so that it moves the progress mark when it has run; also the head, which runs over a prompt in
    many parts."""
    kernels = kernels_of(model.device)
    if model.encoder is not None:
        model.encoder.layers[:] = [_CountedPart(layer, progress, kernels) for layer in model.encoder.layers]
    model.layers[:] = [_CountedLayer(layer, progress, kernels) for layer in model.layers]
    if model.head is not None:
        model.head = _CountedPart(model.head, progress, kernels)


class _CountedPart:
    def __init__(self, part: ModelPart, progress: RankProgress, kernels: Kernels) -> None:
        self.only_kernels = part.only_kernels
        self._part, self._progress, self._kernels = part, progress, kernels

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        x = self._part(x, step)
        self._count()
        return x

    def _count(self) -> None:
        self._kernels.increment(self._progress.layer_count_address)


class _CountedLayer(_CountedPart):
    def __init__(self, layer: Layer, progress: RankProgress, kernels: Kernels) -> None:
        super().__init__(layer, progress, kernels)
        self._layer = layer

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._layer.keep(x, step)
        self._count()
