"""`orca bench encoder`: measures the encoder of a model alone, against this machine's rate of matrix products.

The encoder runs sources of one length at a time, as in a step without targets. Its operations are counted from the
sizes of its matrices, and its attention's from the lengths. The machine's rate is the best of two: the encoder's own
products, launched together as the engine launches them, and one large product of PyTorch. All sides take turns.

It also measures a step without sources on a stage that has only encoder layers, which then has nothing to compute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.parts.stage_processes import new_request
from orca.bench.peers.engine_peer import products
from orca.core.domain.errors import SettingError
from orca.core.domain.model import load_model_info
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS
from orca.core.domain.step import Epoch, Part, Row, Step
from orca.worker.models.build import StageModel, load_stage
from orca.worker.models.config import load_config
from orca.worker.models.encoder_decoder.encoder_run import EncoderRun
from orca.worker.models.model_shape import EncoderDecoderShape
from orca.worker.parallel.shard import Shard
from orca.worker.stage.encoder_steps import EncoderSteps, PreparedSources
from orca.worker.stage.stage import Stage

_LARGE = 2048
"""Rows and columns of PyTorch's product: far more than the caches hold, and enough for its best speed."""


_BATCH = 16
"""Targets of a step without sources."""

_Side = tuple[list[float], Callable[[], object]]
"""The times of a computation so far, and the computation."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of one length, which run in one step."""

    count: int
    tokens: int  # of each

    def __str__(self) -> str:
        return f"{self.count}x{self.tokens}"


@dataclass(slots=True, kw_only=True)
class EncoderTimes:
    """The times of the encoder with some sources: one for each round, in seconds."""

    sources: Sources
    operations: float  # of products and attention: two for each multiplication
    product_operations: float  # of the products alone
    machine_rate: float = 0.0  # operations per second
    encoder_s: list[float] = field(default_factory=list)
    products_s: list[float] = field(default_factory=list)
    attention_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Operations per second of the whole encoder."""
        return self.operations / median(self.encoder_s)

    @property
    def share(self) -> float:
        """The encoder's rate as a share of the machine's."""
        return self.rate / self.machine_rate


def load_encoder(model: Path, *, dtype: str, threads: int) -> StageModel:
    """Return a stage that holds the whole encoder of a model folder and nothing else.

    Raises: ModelError; SettingError for a decoder-only model.
    """
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    config = load_config(model)
    if not isinstance(config, EncoderDecoderShape):
        raise SettingError(f"{model}: a decoder-only model has no encoder")
    info = load_model_info(model, dtype=dtype)
    return load_stage(info, Shard(stage=0, stages=2, layer_counts=(config.encoder.layers, config.decoder.layers)))


def measure(stage: StageModel, cases: Sequence[Sources], *, rounds: int) -> list[EncoderTimes]:
    """Time the encoder and its parts. Args: stage: of `load_encoder`."""
    run = stage.encoder
    assert run is not None
    steps = EncoderSteps(stage, run, DEFAULT_BLOCK_TOKENS)
    large_s: list[float] = []
    sides: list[_Side] = [(large_s, _large_product(stage.dtype))]
    times = []
    for case in cases:
        prepared = steps.prepare([[token % stage.config.vocab_size for token in range(case.tokens)]] * case.count)
        each = _uncounted(stage, run, case)
        sides += [
            (each.encoder_s, partial(steps.run, prepared, None)),
            (each.products_s, _products_alone(stage, case.count * case.tokens)),
            (each.attention_s, _attention_alone(stage, run, prepared, case.count * case.tokens)),
        ]
        times.append(each)
    _take_turns(sides, rounds)
    by_products = [each.product_operations / median(each.products_s) for each in times]
    for each in times:
        each.machine_rate = max(2.0 * _LARGE**3 / median(large_s), *by_products)
    return times


def _take_turns(sides: Sequence[_Side], rounds: int) -> None:
    for number in range(rounds + 1):
        for seconds, call in sides:
            start_s = perf_counter()
            call()
            if number:  # the first round compiles and warms up
                seconds.append(perf_counter() - start_s)


def _uncounted(stage: StageModel, run: EncoderRun, case: Sources) -> EncoderTimes:
    """Return the operations of a case, and no times yet."""
    by_row = 2.0 * sum(linear.inputs * linear.outputs for linear in stage.linears)
    by_pair = 4.0 * run.heads.num_query * run.head_dim * len(run.layers)  # of query and key
    product_operations = case.count * case.tokens * by_row
    return EncoderTimes(
        sources=case,
        operations=product_operations + case.count * case.tokens**2 * by_pair,
        product_operations=product_operations,
    )


def _products_alone(stage: StageModel, rows: int) -> Callable[[], object]:
    """Return the products of all layers, over any numbers."""
    inputs = {linear.inputs: torch.randn(rows, linear.inputs, dtype=stage.dtype) for linear in stage.linears}
    return products([(linear, inputs[linear.inputs]) for linear in stage.linears])


def time_idle_steps(model: StageModel, *, rounds: int) -> list[float]:
    """Return the seconds of steps without sources, for a batch of targets. Args: model: of `load_encoder`."""
    epoch, handles, taken = Epoch(1, "bench"), range(1, _BATCH + 1), []
    new = [new_request(handle, [5] * 16, rounds + 1, decoder_prefix=(0,)) for handle in handles]
    slots = sum(each.slots(DEFAULT_BLOCK_TOKENS) for each in new)
    stage = Stage(model, slots=slots, block_tokens=DEFAULT_BLOCK_TOKENS, eos_token_ids=(), feeds_tokens=True)
    sources = [Row(handle, 0, 16, sample=False, part=Part.SOURCE) for handle in handles]
    for number in range(1, rounds + 2):
        targets = [Row(handle, number - 1, 1, sample=True, part=Part.TARGET) for handle in handles]
        rows = targets if number > 1 else [*sources, *targets]
        step = Step(epoch=epoch, number=number, new=tuple(new), rows=tuple(rows))
        start_s = perf_counter()
        stage.forward(stage.begin(step))
        if number > 1:
            taken.append(perf_counter() - start_s)
        new = []
    return taken


def _attention_alone(stage: StageModel, run: EncoderRun, prepared: PreparedSources, rows: int) -> Callable[[], None]:
    """Return the attention of all layers, without a bias, over any numbers."""
    attend = prepared.context.attention[None]
    qkv = torch.randn(rows, 3 * run.heads.num_query, run.head_dim, dtype=stage.dtype)

    def call() -> None:
        for cache in prepared.context.caches:
            attend(qkv, cache, run.head_dim**-0.5)

    return call


def _large_product(dtype: torch.dtype) -> Callable[[], object]:
    one, other = (torch.randn(_LARGE, _LARGE, dtype=dtype) for _ in range(2))
    return lambda: one @ other


def lines(times: Sequence[EncoderTimes], idle_s: Sequence[float]) -> list[str]:
    """Return a table: the encoder's time, its parts, and its share of the machine's rate.

    Args: idle_s: the times of steps without sources.
    """
    head = (
        f"{'sources':>8}{'ms':>9}{'products':>10}{'attention':>11}{'rest':>8}{'GFLOP/s':>9}{'machine':>9}{'share':>7}"
    )
    return [head, *map(_line, times), f"a step of {_BATCH} targets without sources: {1e6 * median(idle_s):.0f} us"]


def _line(each: EncoderTimes) -> str:
    whole, products_ms, attention_ms = (
        1e3 * median(some) for some in (each.encoder_s, each.products_s, each.attention_s)
    )
    rest = whole - products_ms - attention_ms
    return (
        f"{each.sources!s:>8}{whole:>9.2f}{products_ms:>10.2f}{attention_ms:>11.2f}{rest:>8.2f}"
        f"{each.rate / 1e9:>9.0f}{each.machine_rate / 1e9:>9.0f}{each.share:>7.0%}"
    )


def to_json(times: Sequence[EncoderTimes]) -> list[dict[str, Any]]:
    """Return the same figures as plain data."""
    return [
        {
            "sources": each.sources.count,
            "tokens": each.sources.tokens,
            "encoder_s": median(each.encoder_s),
            "products_s": median(each.products_s),
            "attention_s": median(each.attention_s),
            "flops": each.operations,
            "machine_flops_s": each.machine_rate,
            "share": each.share,
        }
        for each in times
    ]


def figures(
    times: Sequence[EncoderTimes], idle_s: Sequence[float], settings: Mapping[str, Setting | None]
) -> list[Measured]:
    """Return the same figures as records with these settings of model and threads."""
    what = "Time of a step without sources on a stage of encoder layers"
    found = [measured(what, list(idle_s), "us", {**settings, "targets": _BATCH}, scale=1e6)]
    for each in times:
        chosen = {**settings, "sources": str(each.sources)}
        shares = [100 * each.operations / seconds / each.machine_rate for seconds in each.encoder_s]
        found.append(measured("Encoder's share of the rate of matrix products", shares, "%", chosen))
        for part, seconds in (
            ("whole", each.encoder_s),
            ("products alone", each.products_s),
            ("attention alone", each.attention_s),
        ):
            found.append(measured("Time of the encoder", seconds, "ms", {**chosen, "part": part}, scale=1000))
    return found
