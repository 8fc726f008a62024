"""Check the tokens of a run against plain formulas in float32 (plain_llama.py, seq2seq/plain_t5.py).

Each token is judged after the answer's own earlier tokens. So a near-tie excuses one token, not the rest of its answer.
The dtype decides which difference of logits is a near-tie. In float32 it is a fixed margin (peers/judgement.py). In a
shorter dtype the same formulas are also computed in that dtype, which shows the largest error e of a logit. A correct
choice may then be up to 2 e below the largest logit. The verdict includes the share of the vocabulary within the
margin. If that share is too large, the check proves nothing and the run counts as wrong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orca.bench.gpu.plain_llama import PlainLlama
from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.gpu.seq2seq.plain_t5 import PlainT5
from orca.bench.peers.judgement import EXCUSED_MARGIN, Judgement, judge
from orca.worker.models.config import LlamaConfig
from orca.worker.models.encoder_decoder.t5_config import T5Config

_PASSING_MAX = 0.05
"""Largest share of the vocabulary that may be within the margin. With this share, 30 tokens drawn at random would all
pass with a probability of 10^-39.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of checking some answers against the reference."""

    judgement: Judgement
    margin: float  # of logits: the largest distance from the largest logit that is allowed
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
    config: LlamaConfig | T5Config,
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
    config: LlamaConfig | T5Config,
    tensors: RandomTensors,
    dtype: torch.dtype,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
) -> list[Tensor]:
    """Return the logits before each token, [tokens, vocab], for each answer that has tokens."""
    some = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer]
    if not some:
        return []
    plain = PlainT5(config, tensors, dtype) if isinstance(config, T5Config) else PlainLlama(config, tensors, dtype)
    return plain.answer_logits([prompt for prompt, _ in some], [answer for _, answer in some])


def _passing(logits: Sequence[Tensor], margin: float) -> float:
    def shares() -> Iterator[Tensor]:
        for each in logits:
            yield (each > each.amax(dim=1, keepdim=True) - margin).float().mean(dim=1)

    return float(torch.cat(list(shares())).mean()) if logits else 1.0
