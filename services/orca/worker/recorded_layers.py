"""The layers of steps in which each request runs one token: gathered once for each number of requests, then run again.

Between two such steps only numbers change: the tokens' activations, where their keys and values go, how they are turned
and which contexts they see. So these are copied to where the first step had them, and its kernels run once more,
without the Python that calls them; it takes almost a millisecond a step, as kernels put it out of the processor's
caches each time. On GPUs the same is known as capturing a graph: the scheduling of operators ahead of time of Nimble
(dissertation, chapter 3).
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from orca.kernels.device import RecordedAttention, Recording, kernels_of
from orca.worker.models.blocks import Layer, StepContext

_KEPT = 16
"""Recordings at most: each holds the activations of a layer and some scratch memory."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One recording, and the memory that it reads."""

    hidden: Tensor  # [tokens, hidden]
    context: StepContext
    output: Tensor  # [tokens, hidden], in the end
    kernels: Recording

    def take(self, hidden: Tensor, context: StepContext) -> None:
        """Put another step where this one was."""
        self.hidden.copy_(hidden)
        self.context.slots.copy_(context.slots)
        if self.context.turns is not None and context.turns is not None:
            self.context.turns.copy_(context.turns)
        for window, attention in _attention(self.context).items():
            attention.follow(_attention(context)[window])


class RecordedLayers:
    """Args: layers: kernels alone (blocks.Layer), of a rank that is alone in its stage."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._recorded: OrderedDict[tuple[object, ...], _Recorded] = OrderedDict()

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """hidden [tokens, hidden] through all layers; each request has one token, and all rows are wanted.

        Returns: [tokens, hidden], good until the next call.
        """
        key = (len(hidden), *((window, attention.shape) for window, attention in _attention(context).items()))
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(hidden, context)
            if len(self._recorded) > _KEPT:
                self._recorded.popitem(last=False)
        else:
            self._recorded.move_to_end(key)
            recorded.take(hidden, context)
        recorded.kernels.run()
        return recorded.output

    def _record(self, hidden: Tensor, context: StepContext) -> _Recorded:
        output = hidden
        with kernels_of(hidden.device).recorded() as kernels:
            for layer in self._layers:
                output = layer(output, context)
        return _Recorded(hidden, context, output, kernels)


def _attention(context: StepContext) -> Mapping[int | None, RecordedAttention]:
    return cast("Mapping[int | None, RecordedAttention]", context.attention)
