"""The figures of `orca bench peers` for the benchmark pages."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.peers.results import (
    CONTINUOUS,
    CTRANSLATE2_BY_ANSWER,
    CTRANSLATE2_BY_SOURCE,
    CTRANSLATE2_INT8,
    CTRANSLATE2_TWO,
    CTRANSLATE2_UP_TO,
    ENGINE,
    ENGINE_BFLOAT16,
    ENGINE_INT8,
    OPENVINO_DEFAULT,
    OPENVINO_F32,
    ORCA,
    ORCA_BFLOAT16,
    ORCA_INT8,
    STATIC,
    STATIC_BY_ANSWER,
    STATIC_BY_ARRIVAL,
    STATIC_BY_SOURCE,
    VLLM,
    VLLM_BFLOAT16,
    VLLM_HTTP,
    PeerResult,
)
from orca.planner.simulate.outcomes import Spread

if TYPE_CHECKING:
    from orca.bench.peers.comparison import PeerComparison

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
        STATIC_BY_ARRIVAL: ("Transformers, in order of arrival", "float32"),
        STATIC_BY_SOURCE: ("Transformers, sorted by source", "float32"),
        STATIC_BY_ANSWER: ("Transformers, sorted by answer", "float32"),
        CTRANSLATE2_BY_SOURCE: ("CTranslate2, sorted by source", "float32"),
        CTRANSLATE2_BY_ANSWER: ("CTranslate2, sorted by answer", "float32"),
        CTRANSLATE2_INT8: ("CTranslate2, sorted by source", "int8"),
        CTRANSLATE2_TWO: ("CTranslate2, two batches at once", "float32"),
        **{name: (f"CTranslate2, batches of up to {limit}", "float32") for limit, name in CTRANSLATE2_UP_TO.items()},
        ENGINE_INT8: ("Orca engine", "int8"),
        ORCA_INT8: ("Orca over HTTP", "int8"),
    }
)
"""The system and the precision that a page shows for each system."""


def figures(
    comparison: "PeerComparison", results: Sequence[PeerResult], trace: Mapping[str, Setting]
) -> list[Measured]:
    """Return the speed of each system or, if requests come one by one, its latencies.

    With an encoder-decoder model these are of whole answers: static batches are made for clients that wait for them.
    """
    found = []
    for result in results:
        system, precision = SYSTEMS[result.name]
        model: Setting = comparison.model.name
        settings = {"system": system, "precision": precision, "model": model, "batch": comparison.batch_size, **trace}
        if not comparison.is_paced:
            found += _speeds(result, settings)
        elif comparison.is_encoder_decoder:
            found += _spreads("Time to the whole answer", [each.whole_s for each in result.latencies], settings)
        else:
            found += _spreads("Time to first token", [each.first_token_s for each in result.latencies], settings)
            found += _spreads("Time per token", [each.normalised_s for each in result.latencies], settings)
    return found


def _speeds(result: PeerResult, settings: Mapping[str, Setting]) -> list[Measured]:
    found = [measured("Generated tokens per second", result.tokens_per_s, "tokens/s", settings)]
    if result.shares_of_limit:
        what = "Share of the speed of its matrix products"
        found.append(measured(what, result.shares_of_limit, "%", settings, scale=100))
    return found


def _spreads(what: str, spreads: Sequence[Spread], settings: Mapping[str, Setting]) -> list[Measured]:
    medians, p99s = [spread.p50 for spread in spreads], [spread.p99 for spread in spreads]
    return [
        measured(f"{what}, median", medians, "ms", settings, scale=1000),
        measured(f"{what}, p99", p99s, "ms", settings, scale=1000),
    ]
