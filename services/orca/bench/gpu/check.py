"""Are the tokens of a run right? They are held against plain formulas in float32 (plain_llama.py).

Each token is judged behind the answer's own tokens, so one that went the other way at a near-tie excuses itself only.
What a near-tie is, follows from the dtype. In float32 it is a fixed margin (peers/judgement.py). In a shorter one the
same formulas are computed in that dtype, too: a logit of theirs is off by up to e, so a sound choice may be up to 2 e
behind the largest. How little of the vocabulary that lets pass is part of the verdict, and one that lets too much pass
is none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orca.bench.gpu.plain_llama import PlainLlama
from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.peers.judgement import EXCUSED_MARGIN, Judgement, judge
from orca.worker.models.config import LlamaConfig

_PASSING_MAX = 0.05
"""Of the vocabulary, within the margin: of 30 wrong tokens that were drawn by lot, none would be told in one run of
10^39."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the reference says of some answers."""

    judgement: Judgement
    margin: float  # of logits: so far behind the largest one a token may be
    passing: float  # share of the vocabulary within the margin, a mean over positions

    @property
    def is_right(self) -> bool:
        return self.judgement.is_right and self.passing <= _PASSING_MAX

    def __str__(self) -> str:
        judged = self.judgement
        if self.passing > _PASSING_MAX:
            return f"WRONG: nothing is proved, {self.passing:.0%} of all tokens pass"
        if not judged.is_right:
            return f"WRONG: {judged.wrong} of {judged.tokens} tokens, {judged.wrong_counts} answers of a wrong length"
        ties = f", {judged.excused} of them near-ties within {self.margin:.2g}" if judged.excused else ""
        return f"right: {judged.tokens} tokens{ties}"


def verdict(
    config: LlamaConfig,
    tensors: RandomTensors,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    counts: Sequence[int],
) -> Verdict:
    """
    Args:
        counts: how many tokens each answer should have.
    """
    exact = _logits(config, tensors, torch.float32, prompts, answers)
    margin = EXCUSED_MARGIN
    if tensors.dtype != torch.float32:
        rounded = _logits(config, tensors, tensors.dtype, prompts, answers)
        margin = 2 * max(float((one - other).abs().max()) for one, other in zip(exact, rounded, strict=True))
        del rounded
    told = iter(exact)
    judgement = judge(prompts, counts, answers, lambda prompt, answer: next(told), margin=margin)  # noqa: ARG005
    return Verdict(judgement=judgement, margin=margin, passing=_passing(exact, margin))


def _logits(
    config: LlamaConfig,
    tensors: RandomTensors,
    dtype: torch.dtype,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
) -> list[Tensor]:
    """Of each answer that has tokens, the logits before each of them: [tokens, vocab]."""
    some = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer]
    read = [prompt + answer[:-1] for prompt, answer in some]
    return PlainLlama(config, tensors, dtype).logits(read, [len(answer) for _, answer in some]) if some else []


def _passing(logits: Sequence[Tensor], margin: float) -> float:
    def shares() -> Iterator[Tensor]:
        for each in logits:
            yield (each > each.amax(dim=1, keepdim=True) - margin).float().mean(dim=1)

    return float(torch.cat(list(shares())).mean()) if logits else 1.0
