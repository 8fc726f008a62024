"""`orca bench grammars`: measures what structured output costs.

    matcher   one output of a schema alone: read a vocabulary, build the matcher, then give the mask of each token and
              take the token
    engine    the engine and its policy in one process, all requests under a schema against none, by turns

The schema is an array of objects that does not end, so both sides generate the same number of tokens. The model has
random weights, so each mask is that of another place.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import orjson
import torch

from orca.bench.figures.figure import Measured, Setting
from orca.bench.figures.writer import measured
from orca.bench.peers import engine_peer
from orca.bench.peers.model import made_up_tokenizer
from orca.bench.peers.workload import PeerWorkload
from orca.core.domain.text import Tokenizer
from orca.core.grammars.matching import GrammarVocabulary
from orca.gateway.grammars.fields import StructuredOutputs, grammar_of
from orca.planner.workload.trace import GREEDY
from orca.worker.models.build import load_stage

EOS = 0
"""Token that no answer draws: the schema never ends."""

SCHEMA = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(slots=True, kw_only=True)
class MatcherTimes:
    """The times of one output with a vocabulary, in seconds."""

    vocab: int
    read_s: float  # of the vocabulary, once for each process
    build_s: float  # of the matcher, with its first mask
    token_s: list[float] = field(default_factory=list)  # of each token: take it, and write the next mask


@dataclass(slots=True, kw_only=True)
class EngineSpeeds:
    """Tokens per second, one for each round."""

    free: list[float] = field(default_factory=list)  # no request has a grammar
    constrained: list[float] = field(default_factory=list)  # all have one

    @property
    def ratios(self) -> list[float]:
        """The speed under a schema as a share of the speed without one, by round."""
        return [one / other for one, other in zip(self.constrained, self.free, strict=True)]


def grammar() -> str:
    """Return the grammar of the schema."""
    made = grammar_of(None, StructuredOutputs.model_validate({"json": SCHEMA}))
    assert made is not None
    return made.text


def time_matcher(vocab: int, tokens: int) -> MatcherTimes:
    """Match one output of random tokens. Args: vocab: tokens of a made-up vocabulary with all bytes."""
    inner = made_up_tokenizer(vocab)
    decoder = orjson.loads(inner.to_str())["decoder"]
    tokenizer, chance = Tokenizer(inner, decoder=decoder, named_special_tokens={}), random.Random(vocab)
    mask = np.zeros(-(-vocab // 32), np.uint32)
    start_s = perf_counter()
    vocabulary = GrammarVocabulary(tokenizer, vocab, (EOS,))
    read_s = perf_counter()
    matcher = vocabulary.matcher(grammar())
    matcher.write_mask(mask.ctypes.data, mask.nbytes)
    times = MatcherTimes(vocab=vocab, read_s=read_s - start_s, build_s=perf_counter() - read_s)
    for _ in range(tokens):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(chance.choice(allowed))
        token_start_s = perf_counter()
        matcher.consume((token,))
        matcher.write_mask(mask.ctypes.data, mask.nbytes)
        times.token_s.append(perf_counter() - token_start_s)
    assert matcher.failure is None, matcher.failure
    return times


def measure_engine(folder: Path, workload: PeerWorkload, rounds: int) -> EngineSpeeds:
    """Run the workload on a model with all requests under the schema, and with none, by turns."""
    torch.set_num_threads(workload.threads)
    torch.set_grad_enabled(False)
    model, speeds, tokens = load_stage(folder), EngineSpeeds(), sum(workload.new_tokens)
    constrained = replace(GREEDY, grammar=grammar())
    for sampling in (GREEDY, constrained):
        engine_peer.run(model, workload.head(2 * workload.batch_size), sampling=sampling, eos_token_ids=(EOS,))
    for _ in range(rounds):
        for sampling, found in ((GREEDY, speeds.free), (constrained, speeds.constrained)):
            start_s = perf_counter()
            engine_peer.run(model, workload, sampling=sampling, eos_token_ids=(EOS,))
            found.append(tokens / (perf_counter() - start_s))
    return speeds


def lines(matchers: Sequence[MatcherTimes], speeds: EngineSpeeds) -> list[str]:
    """Return two tables."""
    head = f"{'vocabulary':>10}{'read, ms':>10}{'build, ms':>11}{'token, us':>11}{'p99, us':>9}"
    sides = {"no grammar": speeds.free, "all grammars": speeds.constrained}
    rows = [
        f"{each.vocab:>10}{1e3 * each.read_s:>10.1f}{1e3 * each.build_s:>11.2f}{1e6 * median(each.token_s):>11.1f}"
        f"{1e6 * float(np.quantile(each.token_s, 0.99)):>9.0f}"
        for each in matchers
    ]
    return [
        head,
        *rows,
        *(
            f"{name:12}{median(found):>9.1f} tokens/s ({min(found):.1f} to {max(found):.1f})"
            for name, found in sides.items()
        ),
        f"ratio       {median(speeds.ratios):>9.2f} x ({min(speeds.ratios):.2f} to {max(speeds.ratios):.2f})",
    ]


def to_json(matchers: Sequence[MatcherTimes], speeds: EngineSpeeds) -> dict[str, Any]:
    """Return the same figures as plain data."""
    return {
        "matchers": [
            {"vocab": each.vocab, "read_s": each.read_s, "build_s": each.build_s, "token_s": median(each.token_s)}
            for each in matchers
        ],
        "free_tokens_per_s": speeds.free,
        "constrained_tokens_per_s": speeds.constrained,
    }


def figures(
    matchers: Sequence[MatcherTimes], speeds: EngineSpeeds, settings: Mapping[str, Setting | None]
) -> list[Measured]:
    """Return the same figures as records. Args: settings: of the engine's run."""
    found = []
    for each in matchers:
        vocab: dict[str, Setting | None] = {"vocabulary": each.vocab}
        found += [
            measured("Time to read a vocabulary for grammars", each.read_s, "ms", vocab, scale=1e3),
            measured("Time to build a matcher", each.build_s, "ms", vocab, scale=1e3),
            measured("Time of a masked token", median(each.token_s), "us", vocab, scale=1e6, runs=len(each.token_s)),
        ]
    return [
        *found,
        measured("Tokens per second", speeds.free, "1/s", {**settings, "requests": "without a grammar"}),
        measured("Tokens per second", speeds.constrained, "1/s", {**settings, "requests": "all under a schema"}),
        measured("Speed under a schema", [100 * ratio for ratio in speeds.ratios], "%", settings),
    ]
