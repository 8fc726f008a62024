"""The systems of a comparison with an encoder-decoder model, and how each of them runs."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from orca.bench.peers.comparison import PeerComparison
from orca.bench.peers.results import (
    CTRANSLATE2_BY_ANSWER,
    CTRANSLATE2_BY_SOURCE,
    CTRANSLATE2_INT8,
    CTRANSLATE2_TWO,
    CTRANSLATE2_UP_TO,
    ENGINE,
    ENGINE_BFLOAT16,
    ENGINE_INT8,
    ORCA,
    ORCA_BFLOAT16,
    ORCA_INT8,
    STATIC_BY_ANSWER,
    STATIC_BY_ARRIVAL,
    STATIC_BY_SOURCE,
    PeerRound,
)
from orca.bench.peers.runs import files_of, run_engine, run_module, run_orca, run_peer
from orca.bench.peers.seq2seq.orders import ARRIVAL, BY_ANSWER, BY_SOURCE

TRANSFORMERS_PEER, CTRANSLATE2_PEER = "seq2seq.transformers_peer", "seq2seq.ctranslate2_peer"

_TRANSFORMERS: Mapping[str, str] = MappingProxyType(
    {STATIC_BY_ARRIVAL: ARRIVAL, STATIC_BY_SOURCE: BY_SOURCE, STATIC_BY_ANSWER: BY_ANSWER}
)
_CTRANSLATE2: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        CTRANSLATE2_BY_SOURCE: ("float32", "1", BY_SOURCE),
        CTRANSLATE2_BY_ANSWER: ("float32", "1", BY_ANSWER),
        CTRANSLATE2_TWO: ("float32", "2", BY_SOURCE),
        CTRANSLATE2_INT8: ("int8", "1", BY_SOURCE),
    }
)
_CTRANSLATE2_PACED: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {name: ("float32", "1", str(limit)) for limit, name in CTRANSLATE2_UP_TO.items()}
    | {CTRANSLATE2_TWO: ("float32", "2", "8")}
)


def convert(comparison: PeerComparison) -> None:
    """Convert the model to the format of CTranslate2. Raises: PeerFailed."""
    run_module(
        comparison, str(comparison.ctranslate2), CTRANSLATE2_PEER, "convert", *files_of(comparison, "ctranslate2")
    )


def systems(comparison: PeerComparison) -> dict[str, Callable[[PeerComparison], PeerRound]]:
    """Return the function that runs each system, by name (compare.systems)."""
    runs: dict[str, Callable[[PeerComparison], PeerRound]] = {}
    if not (comparison.is_paced or comparison.only_judges):
        runs |= {name: partial(_run_transformers, order) for name, order in _TRANSFORMERS.items()}
    if comparison.ctranslate2 is not None:
        chosen = _CTRANSLATE2_PACED if comparison.is_paced else _CTRANSLATE2
        runs |= {name: partial(_run_ctranslate2, words) for name, words in chosen.items()}
        runs |= {
            ENGINE_BFLOAT16: partial(run_engine, "bfloat16"),
            ENGINE_INT8: partial(run_engine, "int8"),
            ORCA_BFLOAT16: partial(run_orca, ORCA_BFLOAT16, ("--dtype", "bfloat16")),
            ORCA_INT8: partial(run_orca, ORCA_INT8, ("--quantization", "int8")),
        }
    return runs | {ENGINE: partial(run_engine, "float32"), ORCA: partial(run_orca, ORCA, ())}


def _run_transformers(order: str, comparison: PeerComparison) -> PeerRound:
    return run_peer(comparison, sys.executable, TRANSFORMERS_PEER, order, *files_of(comparison, "transformers.json"))


def _run_ctranslate2(words: tuple[str, str, str], comparison: PeerComparison) -> PeerRound:
    files = files_of(comparison, "ctranslate2", "ctranslate2.json")
    return run_peer(comparison, str(comparison.ctranslate2), CTRANSLATE2_PEER, *words, *files)
