"""The logits of an encoder-decoder model's first tokens, of its stages and of Hugging Face: mistakes show there."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orca.bench.parts.tiny_families import reference_model
from support.worker.stage_driver import Ask, Chain, serve

START = 2
PREFIX = (START, 7, 8, 9, 10, 11)
SOURCES = ([5, 9, 130, 77, 20], [int(token) for token in range(4, 60, 2)], [44])


class _KeptHead:
    """A head that keeps a copy of all logits."""

    only_kernels = False

    def __init__(self, head: Any) -> None:
        self._head = head
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor, step: Any) -> Tensor:
        logits: Tensor = self._head(x, step)
        self.kept.append(logits.clone())
        return logits


def stage_logits(folder: Path) -> Tensor:
    """The logits after PREFIX for each of SOURCES, as the stages compute them: [sources, vocab]."""
    rows = []
    for source in SOURCES:
        chain = Chain(folder)
        model = chain.stages[-1][0]._model
        model.head = kept = _KeptHead(model.head)
        serve(chain, [Ask(source, 1, decoder_prefix=PREFIX)])
        chain.close()
        rows += kept.kept
    return torch.cat(rows)


def reference_logits(folder: Path) -> Tensor:
    """The same, as Hugging Face computes them."""
    model = reference_model(folder)
    prefix = torch.tensor([PREFIX])
    with torch.inference_mode():
        rows = [model(torch.tensor([source]), decoder_input_ids=prefix, use_cache=False) for source in SOURCES]
    return torch.cat([row.logits[:, -1] for row in rows])


def is_close(found: Tensor, wanted: Tensor) -> bool:
    """Return whether they differ only by the rounding of sums."""
    return bool(torch.allclose(found, wanted, rtol=1e-4, atol=2e-3))
