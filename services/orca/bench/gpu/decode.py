"""Decode steps of a model with random weights, checked, then timed beside their limit.

Requests with a context of a thousand tokens run one token each, step after step. Some requests of each batch also run
their prompts. All tokens of these requests are checked, also those of the timed steps. A time is shown only if all of
these tokens are right.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch

from orca.bench.gpu.check import Verdict, verdict
from orca.bench.gpu.device import free, wait
from orca.bench.gpu.host_gap import STEPS as GAP_STEPS
from orca.bench.gpu.host_gap import HostGap, host_gap
from orca.bench.gpu.limits import decode_operations, limit_of, product_rates
from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.gpu.rows import Asked, EngineRow
from orca.bench.gpu.shapes import LLAMA_8B, SMALL, made, random_tokens
from orca.bench.gpu.steps import BatchSteps
from orca.bench.random_scales import GAIN
from orca.worker.models.build import StageModel
from orca.worker.models.config import LlamaConfig

_UNTIMED_STEPS = 8
"""Steps before the timed ones: in the first of them kernels are compiled and steps are recorded."""
_TURNS = 3
"""Timed runs of `steps` steps each; their median counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """The model and the steps that are measured."""

    name: str
    config: LlamaConfig
    batches: tuple[int, ...]  # requests
    context: int  # tokens of each prompt
    whole: int  # most requests of a batch that run their prompts and are checked
    steps: int  # in a timed run

    @property
    def new_tokens(self) -> int:
        return 1 + _UNTIMED_STEPS + _TURNS * self.steps + 2 * GAP_STEPS


ON_GPU = DecodeSizes(name="Llama 8B", config=LLAMA_8B, batches=(1, 64, 256), context=1024, whole=4, steps=16)
ON_CPU = DecodeSizes(name="a small Llama", config=SMALL, batches=(1, 5), context=40, whole=2, steps=2)


def decode_rows(asked: Asked) -> Iterator[EngineRow]:
    """Yield a row for each batch. All batches use the same weights, and each has a cache of its own."""
    sizes = ON_GPU if asked.device.type == "cuda" else ON_CPU
    tensors = RandomTensors(dtype=asked.dtype, device=asked.device)
    model = made(sizes.config, tensors)
    flops_s = product_rates(asked.clock, asked.dtype)
    for batch in sizes.batches:
        yield _row(asked, sizes, batch, model, tensors, flops_s)
    if asked.device.type == "cuda":
        # If a kernel leaves most of the device free, others could run beside it (Nimble's streams).
        yield _row(asked, sizes, sizes.batches[0], model, tensors, flops_s, on_streams=True)
    del model
    free(asked.device)  # for another part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    seconds: float  # of a step, the median of the timed runs
    context: int  # positions that tokens saw in the middle of the timed steps
    gap: HostGap | None
    right: Verdict


def _row(
    asked: Asked,
    sizes: DecodeSizes,
    batch: int,
    model: StageModel,
    tensors: RandomTensors,
    flops_s: Callable[[int, int, int], float],
    *,
    on_streams: bool = False,
) -> EngineRow:
    start_s = time.perf_counter()
    measured = _measure(sizes, batch, model, tensors, on_streams=on_streams)
    operations = decode_operations(sizes.config, batch, measured.context, asked.dtype)
    limit = limit_of(operations, asked.copy_bytes_s, flops_s)
    is_right, gap = measured.right.is_right, measured.gap
    by_events = "; host gap by events" if gap is not None and gap.by == "events" else ""
    return EngineRow(
        name=f"step of {sizes.name}, decode {batch} x {sizes.context}{', on streams' if on_streams else ''}",
        result=f"{measured.right}{by_events}",
        is_right=is_right,
        seconds=measured.seconds if is_right else None,
        limit_s=limit.seconds,
        limit=limit.by,
        has_gap=True,
        host_gap_s=gap.seconds if gap is not None and is_right else None,
        more={
            "batch": batch,
            "context": measured.context,
            "tokens_per_s": batch / measured.seconds if is_right else None,
            "host_gap_by": gap.by if gap is not None else None,
            "margin": measured.right.margin,
            "operations": limit.operations,
            "checked": asdict(measured.right.judgement),
            "took_s": time.perf_counter() - start_s,
        },
    )


def _measure(
    sizes: DecodeSizes, batch: int, model: StageModel, tensors: RandomTensors, *, on_streams: bool
) -> _Measured:
    config, device, whole = sizes.config, tensors.device, min(sizes.whole, batch)
    prompts = [random_tokens(config, sizes.context, seed) for seed in range(batch)]
    steps = BatchSteps(
        model, prompts, whole=whole, new_tokens=sizes.new_tokens, kv_deviation=GAIN, on_streams=on_streams
    )
    steps.run(1 + _UNTIMED_STEPS)
    context = steps.context + _TURNS * sizes.steps // 2
    seconds = median(_seconds(steps, sizes.steps, device) for _ in range(_TURNS))
    gap = host_gap(steps, device)
    answers, taken = steps.answers[:whole], steps.taken
    del steps
    free(device)  # of its cache
    right = verdict(config, tensors, prompts[:whole], answers, [taken] * whole)
    return _Measured(seconds=seconds, context=context, gap=gap, right=right)


def _seconds(steps: BatchSteps, count: int, device: torch.device) -> float:
    """Return the mean time of a step."""
    wait(device)
    start_s = time.perf_counter()
    steps.run(count)
    wait(device)
    return (time.perf_counter() - start_s) / count
