"""The figures of `orca bench peers` for the benchmark pages."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.peers.results import (
    CONTINUOUS,
    ENGINE,
    ENGINE_BFLOAT16,
    OPENVINO_DEFAULT,
    OPENVINO_F32,
    ORCA,
    ORCA_BFLOAT16,
    STATIC,
    VLLM,
    VLLM_BFLOAT16,
    VLLM_HTTP,
    PeerResult,
)

if TYPE_CHECKING:
    from orca.bench.peers.compare import PeerComparison

SYSTEMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        STATIC: ("Transformers, static batches", "float32"),
        CONTINUOUS: ("Transformers, continuous batching", "float32"),
        OPENVINO_F32: ("OpenVINO GenAI", "float32"),
        OPENVINO_DEFAULT: ("OpenVINO GenAI", "reduced"),
        VLLM: ("vLLM", "float32"),
        VLLM_BFLOAT16: ("vLLM", "reduced"),
        VLLM_HTTP: ("vLLM over HTTP", "float32"),
        ENGINE: ("Orca engine", "float32"),
        ENGINE_BFLOAT16: ("Orca engine", "reduced"),
        ORCA: ("Orca over HTTP", "float32"),
        ORCA_BFLOAT16: ("Orca over HTTP", "reduced"),
    }
)
"""The system and the precision that a page shows for each system."""


def figures(
    comparison: "PeerComparison", results: Sequence[PeerResult], trace: Mapping[str, Setting]
) -> list[Measured]:
    """Return the speed of each system or, if requests come one by one, its latencies."""
    found = []
    for result in results:
        system, precision = SYSTEMS[result.name]
        model: Setting = comparison.model.name
        settings = {"system": system, "precision": precision, "model": model, "batch": comparison.batch_size, **trace}
        found += _latencies(result, settings) if comparison.is_paced else _speeds(result, settings)
    return found


def _speeds(result: PeerResult, settings: Mapping[str, Setting]) -> list[Measured]:
    found = [measured("Generated tokens per second", result.tokens_per_s, "tokens/s", settings)]
    if result.shares_of_limit:
        what = "Share of the speed of its matrix products"
        found.append(measured(what, result.shares_of_limit, "%", settings, scale=100))
    return found


def _latencies(result: PeerResult, settings: Mapping[str, Setting]) -> list[Measured]:
    found = []
    for what, spreads in (
        ("Time to first token", [round_.first_token_s for round_ in result.latencies]),
        ("Time per token", [round_.normalised_s for round_ in result.latencies]),
    ):
        medians, p99s = [spread.p50 for spread in spreads], [spread.p99 for spread in spreads]
        found.append(measured(f"{what}, median", medians, "ms", settings, scale=1000))
        found.append(measured(f"{what}, p99", p99s, "ms", settings, scale=1000))
    return found
