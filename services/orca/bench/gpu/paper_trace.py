"""The paper's trace (ORCA, section 6.2), run by Orca's engine and policy, and by Hugging Face transformers.
Transformers runs it with static batching and with continuous batching. All use the same weights, in the same process.

Prompts are U(32,512), outputs U(1,128), and all requests are there at the start. This is the limit of a Poisson process
whose rate rises, so each system is as busy as it can be. The model has about a billion parameters: the systems run one
after the other with their own copies of the weights, and the slowest of them should end within minutes.

Orca's tokens of some requests in the timed run are checked. Those of another library are compared with Orca's. In a
short dtype two correct answers differ after their first near-tie, so the table shows for how many tokens they agree.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from orca.bench.gpu.check import Verdict, verdict
from orca.bench.gpu.device import free
from orca.bench.gpu.hugging_face import hugging_face_model, without_hub
from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.gpu.rows import Asked, EngineRow, said
from orca.bench.gpu.shapes import LLAMA_1B, SMALL, made
from orca.bench.peers.engine_peer import run
from orca.bench.peers.transformers_peer import continuous_batching, static_batching
from orca.bench.peers.workload import PeerAnswer, PeerWorkload
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import PRESETS, TraceSpec, generate
from orca.worker.models.build import StageModel
from orca.worker.models.config import LlamaConfig

System = Callable[[PeerWorkload], PeerAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSizes:
    """The model and the trace that are measured."""

    name: str
    config: LlamaConfig
    spec: TraceSpec
    batch_size: int  # requests in a batch, of each system
    judged: int  # number of first requests that are checked
    continuous_tokens: tuple[int, ...]  # bounds of a step in the library's continuous batching; the best one counts


ON_GPU = TraceSizes(
    name="Llama 1B",
    config=LLAMA_1B,
    spec=TraceSpec(requests=512, prompt_tokens=PRESETS["paper"][0], new_tokens=PRESETS["paper"][1]),
    batch_size=64,
    judged=32,
    continuous_tokens=(512, 2048),
)
ON_CPU = TraceSizes(
    name="a small Llama",
    config=SMALL,
    spec=TraceSpec(requests=9, prompt_tokens=Range(4, 30), new_tokens=Range(1, 12)),
    batch_size=3,
    judged=9,
    continuous_tokens=(64,),
)


def trace_rows(asked: Asked) -> Iterator[EngineRow]:
    """Yield Orca's row, then the rows of the other systems."""
    sizes = ON_GPU if asked.device.type == "cuda" else ON_CPU
    contest = _Contest(sizes, RandomTensors(dtype=asked.dtype, device=asked.device))
    ours = contest.orca()
    right = contest.judge(ours)
    yield EngineRow(
        name=f"trace of {sizes.name}, {sizes.spec.requests} requests: Orca",
        result=str(right),
        is_right=right.is_right,
        seconds=ours.seconds if right.is_right else None,
        more=_figures(right, ours),
    )
    if not right.is_right:
        return
    try:
        with without_hub():
            yield from _rivals(sizes, contest, ours)
    except Exception as error:  # from another library, if it is installed at all: any kind of error
        yield EngineRow(name="trace: Hugging Face", result=f"left out: {said(error)}")


def _rivals(sizes: TraceSizes, contest: "_Contest", ours: PeerAnswer) -> list[EngineRow]:
    model = hugging_face_model(sizes.config, contest.tensors)
    continuous = [partial(continuous_batching, model, batch_tokens=tokens) for tokens in sizes.continuous_tokens]
    return [
        _rival("static", [partial(static_batching, model)], contest, ours),
        _rival("continuous", continuous, contest, ours),
    ]


class _Contest:
    """The requests and weights that are the same for all systems."""

    def __init__(self, sizes: TraceSizes, tensors: RandomTensors) -> None:
        self.tensors = tensors
        self._sizes = sizes
        self._workload = PeerWorkload.of(
            generate(sizes.spec),
            Path("random"),
            sizes.config.vocab_size,
            batch_size=sizes.batch_size,
            threads=torch.get_num_threads(),
        )

    def orca(self) -> PeerAnswer:
        ran = self.timed(partial(_engine, made(self._sizes.config, self.tensors)))
        free(self.tensors.device)
        return ran

    def timed(self, system: System) -> PeerAnswer:
        """Run a system after a short run that sets it up."""
        system(self._workload.head(2 * self._workload.batch_size))
        return system(self._workload)

    def judge(self, ran: PeerAnswer) -> Verdict:
        """Check the first answers, and the lengths of all."""
        counts, judged = self._workload.new_tokens, self._sizes.judged
        prompts, answers = self._workload.prompts[:judged], ran.tokens[:judged]
        found = verdict(self._sizes.config, self.tensors, prompts, answers, counts[:judged])
        rest = zip(ran.tokens[judged:], counts[judged:], strict=True)
        wrong = found.judgement.wrong_counts + sum(len(answer) != count for answer, count in rest)
        return replace(found, judgement=replace(found.judgement, wrong_counts=wrong))


def _engine(model: StageModel, workload: PeerWorkload) -> PeerAnswer:
    start_s = time.perf_counter()
    ran = run(model, workload)
    return PeerAnswer(seconds=time.perf_counter() - start_s, tokens=ran.tokens)


def _figures(right: Verdict, ran: PeerAnswer) -> dict[str, Any]:
    judged = {"checked": right.judgement.to_json(), "margin": right.margin}
    return judged | {"tokens_per_s": sum(map(len, ran.tokens)) / ran.seconds if right.is_right else None}


def _rival(kind: str, ways: Sequence[System], contest: _Contest, ours: PeerAnswer) -> EngineRow:
    """Return the row of the fastest of some ways to run a system. Show errors of its library in the row, and go on."""
    name = f"trace: Hugging Face {kind} batching"
    ran: list[PeerAnswer] = []
    failed = ""
    for way in ways:
        try:
            ran.append(contest.timed(way))
        except Exception as error:  # from another library: any kind of error
            failed = said(error)
    if not ran:
        return EngineRow(name=name, result=f"left out: {failed}")
    best = min(ran, key=lambda each: each.seconds)
    right = contest.judge(best)
    if not right.is_right:
        return EngineRow(name=name, result=f"left out: {right}", more=_figures(right, best))
    equal = sum(map(list.__eq__, best.tokens, ours.tokens)) / len(ours.tokens)
    agreed = mean(map(_agreed, best.tokens, ours.tokens))
    whole = mean(map(len, ours.tokens))
    return EngineRow(
        name=name,
        result=f"{right}; {equal:.0%} of answers as Orca's, agreeing for {agreed:.1f} of {whole:.1f} tokens",
        seconds=best.seconds,
        times_faster=best.seconds / ours.seconds,
        more=_figures(right, best) | {"equal": equal, "agreed_tokens": agreed},
    )


def _agreed(one: list[int], other: list[int]) -> int:
    """Count the tokens before the first one that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
