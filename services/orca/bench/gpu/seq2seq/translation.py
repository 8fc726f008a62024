"""A batch of sources and their answers on an encoder-decoder model, checked, then shown beside its limit.

The shape is flan-T5-XL's, with random weights. All requests are there at the start and have answers of one length, so
the first step runs all sources, and all later steps run one token of each request. Orca's engine and policy run them.
NVIDIA publishes the speed of TensorRT-LLM for this model and such requests.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from orca.bench.gpu.check import verdict
from orca.bench.gpu.device import free, wait
from orca.bench.gpu.limits import DecodeOperation, limit_of, product_rates
from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.gpu.rows import Asked, EngineRow
from orca.bench.gpu.shapes import made
from orca.bench.peers.engine_peer import run
from orca.bench.peers.workload import PeerWorkload
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import TraceSpec, generate
from orca.worker.models.encoder_decoder.t5_config import T5Config
from orca.worker.models.model_shape import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationSizes:
    """The model and the requests that are measured."""

    name: str
    config: T5Config
    requests: int  # all in one batch
    sources: Range  # tokens
    new_tokens: int
    judged: int  # number of first requests that are checked


def t5(*, layers: int, hidden: int, heads: int, head_dim: int, intermediate: int, vocab: int) -> T5Config:
    """Return the config of a T5 1.1 with a head of its own. Args: layers: of each stack."""
    stack = Stack(layers=layers, heads=heads, head_dim=head_dim, intermediate_size=intermediate)
    return T5Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=2 * layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        is_tied=False,
        windows=(None,) * (2 * layers),
        encoder=stack,
        decoder=stack,
        activation="gelu_new",
        norm_eps=1e-6,
        is_gated=True,
        buckets=32,
        max_distance=128,
        has_bias_in_each_layer=False,
        logit_scale=1.0,
    )


FLAN_T5_XL = t5(layers=24, hidden=2048, heads=32, head_dim=64, intermediate=5120, vocab=32_128)
SMALL_T5 = t5(layers=2, hidden=40, heads=3, head_dim=8, intermediate=72, vocab=290)
"""A model for a CPU, of sizes that are no multiples of a block."""

ON_GPU = TranslationSizes(
    name="flan-T5-XL", config=FLAN_T5_XL, requests=128, sources=Range(260, 440), new_tokens=128, judged=8
)
ON_CPU = TranslationSizes(name="a small T5", config=SMALL_T5, requests=5, sources=Range(4, 30), new_tokens=6, judged=5)
_PUBLISHED = "TensorRT-LLM publishes 4768 tokens/s on an H100"


def translation_rows(asked: Asked) -> Iterator[EngineRow]:
    """Yield one row: the whole batch, from the first step to the last token."""
    sizes = ON_GPU if asked.device.type == "cuda" else ON_CPU
    tensors = RandomTensors(dtype=asked.dtype, device=asked.device)
    spec = TraceSpec(
        requests=sizes.requests,
        prompt_tokens=sizes.sources,
        new_tokens=Range(sizes.new_tokens, sizes.new_tokens),
    )
    workload = PeerWorkload.of(
        generate(spec),
        Path("random"),
        sizes.config.vocab_size,
        batch_size=sizes.requests,
        threads=torch.get_num_threads(),
    )
    model = made(sizes.config, tensors)
    run(model, workload)  # compiles kernels and records steps
    wait(asked.device)
    start_s = time.perf_counter()
    answers = run(model, workload).tokens
    wait(asked.device)
    seconds = time.perf_counter() - start_s
    del model
    free(asked.device)
    judged = sizes.judged
    right = verdict(sizes.config, tensors, workload.prompts[:judged], answers[:judged], workload.new_tokens[:judged])
    is_right = right.is_right and all(len(answer) == sizes.new_tokens for answer in answers)
    operations = translation_operations(sizes.config, [len(each) for each in workload.prompts], sizes, asked.dtype)
    limit = limit_of(operations, asked.copy_bytes_s, product_rates(asked.clock, asked.dtype))
    tokens_per_s = sizes.requests * sizes.new_tokens / seconds
    beside = f"; {tokens_per_s:.0f} tokens/s, {_PUBLISHED}" if asked.device.type == "cuda" and is_right else ""
    yield EngineRow(
        name=f"{sizes.name}, {sizes.requests} sources, {sizes.new_tokens} tokens each",
        result=f"{right}{beside}",
        is_right=is_right,
        seconds=seconds if is_right else None,
        limit_s=limit.seconds,
        limit=limit.by,
        more={
            "tokens_per_s": tokens_per_s if is_right else None,
            "checked": right.judgement.to_json(),
            "margin": right.margin,
            "operations": limit.operations,
        },
    )


def translation_operations(
    config: T5Config, sources: list[int], sizes: TranslationSizes, dtype: torch.dtype
) -> Iterator[DecodeOperation]:
    """Yield the operations of all steps, as in limits.decode_operations.

    Args:
        sources: tokens of each source.
    """
    size, hidden, vocab = dtype.itemsize, config.hidden_size, config.vocab_size
    inner, wide = config.num_heads * config.head_dim, config.decoder.intermediate_size
    steps, batch, tokens = sizes.new_tokens, sizes.requests, sum(sources)

    def product(name: str, times: int, rows: int, inputs: int, outputs: int) -> DecodeOperation:
        moved = inputs * outputs + rows * (inputs + outputs)
        return DecodeOperation(name=name, times=times, bytes=size * moved, product=(rows, inputs, outputs))

    layers = config.encoder.layers
    yield product("encoder: query, key, value", layers, tokens, hidden, 3 * inner)
    # Both products of attention, scores and sums, have a source's length as rows and as one of their sizes.
    mean = tokens // len(sources)
    pairs = product("", 1, mean, config.head_dim, mean)
    yield DecodeOperation(
        name="encoder: attention",
        times=layers * len(sources) * config.num_heads * 2,
        bytes=size * 2 * mean * config.head_dim,
        product=pairs.product,
    )
    yield product("encoder: attention output", layers, tokens, inner, hidden)
    yield product("encoder: gate and up", layers, tokens, hidden, 2 * wide)
    yield product("encoder: down", layers, tokens, wide, hidden)

    layers = config.decoder.layers
    yield product("keys and values of sources", layers, tokens, hidden, 2 * inner)
    yield product("query, key, value", layers * steps, batch, hidden, 3 * inner)
    seen = 2 * batch * (steps + 1) // 2 * inner + 2 * batch * inner
    yield DecodeOperation(name="self attention", times=layers * steps, bytes=size * seen)
    yield product("query of sources", layers * steps, batch, hidden, inner)
    yield DecodeOperation(
        name="cross attention", times=layers * steps, bytes=size * (2 * tokens * inner + 2 * batch * inner)
    )
    yield product("attention outputs", 2 * layers * steps, batch, inner, hidden)
    yield product("gate and up", layers * steps, batch, hidden, 2 * wide)
    yield product("down", layers * steps, batch, wide, hidden)
    yield product("head", steps, batch, hidden, vocab)
