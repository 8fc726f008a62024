"""Measure weights of 8 bits: `python -m orca.bench.parts.int8 loss FOLDER...`, or `speed 2`.

`loss` compares the next-token distributions of each model with those in float32, after texts that the model wrote
itself at temperature 1. It prints the share of contexts with the same likeliest token, and the mean KL divergence in
nats. Without folders, it takes a tiny random model of each family.

`speed` prints milliseconds of a product in the fastest layout, with this number of threads (1 by default). The shapes
are those of models of 0.06 to 0.5 billion parameters. Each time is the median of rounds in which all candidates take
turns.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from orca.bench.parts.tiny_families import FAMILIES, tiny_checkpoint
from orca.core.domain.model import load_model_info
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Claim, Epoch, NewRequest, Row, Step
from orca.worker.models.build import StageModel, load_stage
from orca.worker.parallel.shard import Shard
from orca.worker.rank.local_engine import LocalEngine
from orca.worker.stage.stage import Stage
from orca.worker.weights.int8_linear import INT8_LAYOUTS
from orca.worker.weights.layout_choice import LayoutChooser, fastest_layout
from orca.worker.weights.linear import Linear

TEXTS, LENGTH, BLOCK_TOKENS = 40, 16, 4
EPOCH = Epoch(1, "bench")
KINDS = (("float32", "int8"), ("bfloat16", None), ("bfloat16", "int8"))

SHAPES = ((1536, 512), (512, 512), (2816, 512), (512, 1408), (32000, 512), (9728, 896), (896, 4864))
ROWS = (1, 4, 16, 50, 128, 512)
ROUNDS = 25


def loss(folder: Path) -> None:
    contexts = texts(folder)
    wanted = logprobs(folder, contexts, "float32", None)
    for dtype, quantization in KINDS:
        found = logprobs(folder, contexts, dtype, quantization)
        same = (found.argmax(1) == wanted.argmax(1)).float().mean().item()
        divergence = (wanted.exp() * (wanted - found)).sum(1).mean().item()
        kind = dtype if quantization is None else f"{dtype} {quantization}"
        print(f"{folder.name:12} {kind:14} {same:7.1%} of {len(contexts)} alike, KL {divergence:.5f}", flush=True)


def texts(folder: Path) -> list[list[int]]:
    """Return all beginnings of texts that the model writes."""
    vocab_size = load_model_info(folder).vocab_size
    starts = torch.randint(vocab_size, (TEXTS,), generator=torch.Generator().manual_seed(0)).tolist()
    written = asyncio.run(_written(_model(folder, "float32", None), starts))
    return [text[:length] for text in written for length in range(1, LENGTH + 1)]


async def _written(model: StageModel, starts: list[int]) -> list[list[int]]:
    """Return a text of LENGTH tokens after each start."""
    engine = LocalEngine([model], slots=TEXTS * (LENGTH + BLOCK_TOKENS), block_tokens=BLOCK_TOKENS, prefetch=0)
    found = [[start] for start in starts]
    try:
        await engine.form(EPOCH)
        results = engine.results()
        new = tuple(
            _request(handle, text, LENGTH, SamplingParams(temperature=1.0, seed=handle, ignore_eos=True))
            for handle, text in enumerate(found)
        )
        for number in range(1, LENGTH):
            rows = tuple(
                Row(handle=handle, start=number - 1, count=1, sample=True, token=text[-1] if number > 1 else None)
                for handle, text in enumerate(found)
            )
            await engine.submit(Step(epoch=EPOCH, number=number, new=new if number == 1 else (), rows=rows))
            for drawn in (await anext(results)).sampled:
                found[drawn.handle].append(drawn.token.id)
    finally:
        await engine.close()
    return found


def logprobs(folder: Path, contexts: list[list[int]], dtype: str, quantization: str | None) -> Tensor:
    """Return the log probabilities [contexts, vocab] of the token after each context."""
    stage = Stage(
        _model(folder, dtype, quantization),
        slots=len(contexts) * (LENGTH + BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        eos_token_ids=(),
        feeds_tokens=False,
    )
    greedy = SamplingParams(temperature=0.0)
    new = tuple(_request(handle, tokens, len(tokens) + 1, greedy) for handle, tokens in enumerate(contexts))
    rows = tuple(Row(handle=one.handle, start=0, count=len(one.tokens), sample=True) for one in new)
    prepared = stage.begin(Step(epoch=EPOCH, number=1, new=new, rows=rows))
    return stage.forward(prepared).tensor.double().log_softmax(dim=1)


def _model(folder: Path, dtype: str, quantization: str | None) -> StageModel:
    return load_stage(folder, Shard(stage=0, stages=1), dtype=dtype, quantization=quantization, packs=False)


def _request(handle: int, tokens: list[int], most: int, sampling: SamplingParams) -> NewRequest:
    return NewRequest(
        handle=handle,
        request_id=str(handle),
        claim=Claim(1, "bench/1"),
        tokens=tuple(tokens),
        prompt_length=len(tokens),
        max_total_tokens=most,
        sampling=sampling,
    )


def speed(threads: int) -> None:
    torch.set_num_threads(threads)
    in_dtype, in_bytes = LayoutChooser(), LayoutChooser(choose=partial(fastest_layout, layouts=INT8_LAYOUTS))
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs)
        half = weight.bfloat16()
        linears = [packing.linear(each) for each in (weight, half) for packing in (in_dtype, in_bytes)]
        print(f"{outputs} x {inputs}: {', '.join(type(each).__name__ for each in linears)}")
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            full_ms, of_full_ms, half_ms, of_half_ms = medians(linears, [x, x, x.bfloat16(), x.bfloat16()])
            print(
                f"{outputs:6} x {inputs:5}, {rows:4} rows: float32 {full_ms:8.3f}, bfloat16 {half_ms:8.3f}; int8 in"
                f" float32 {of_full_ms:8.3f} ({full_ms / of_full_ms:.2f} times as fast), in bfloat16"
                f" {of_half_ms:8.3f} ({half_ms / of_half_ms:.2f} times as fast)",
                flush=True,
            )


def medians(linears: list[Linear], inputs: list[Tensor]) -> list[float]:
    times: list[list[float]] = [[] for _ in linears]
    for _ in range(ROUNDS):
        for linear, x, taken in zip(linears, inputs, times, strict=True):
            start = time.perf_counter()
            linear(x)
            taken.append((time.perf_counter() - start) * 1000)
    return [statistics.median(taken) for taken in times]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loss", "speed"))
    parser.add_argument("more", nargs="*", metavar="FOLDER|THREADS")
    options = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    if options.what == "speed":
        speed(int(options.more[0]) if options.more else 1)
    elif options.more:
        for folder in options.more:
            loss(Path(folder))
    else:
        with tempfile.TemporaryDirectory() as folder:
            for family in FAMILIES:
                loss(tiny_checkpoint(family, Path(folder) / family))


if __name__ == "__main__":
    main(sys.argv[1:])
