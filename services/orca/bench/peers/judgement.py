"""Judges greedy tokens: compares each one with the logits of a reference after the same tokens.

The reference reads the answer's own tokens and not its own choices. So the judgement of a token does not depend on
earlier ones: a near-tie with the other result excuses only itself, not the rest of the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

EXCUSED_MARGIN = 1e-4
"""Float32 sums in another order can differ this much: a token whose logit is this close to the largest is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The result of comparing the answers to a workload with a reference."""

    tokens: int  # judged
    excused: int  # not the reference's own choice, but within the margin
    wrong: int  # outside the margin
    wrong_counts: int  # requests with another number of tokens than requested

    @property
    def is_right(self) -> bool:
        return self.wrong == 0 and self.wrong_counts == 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        verdict = "equal" if self.is_right else "WRONG"
        return (
            f"{verdict}: {self.tokens} tokens, {self.excused} excused by a margin under {EXCUSED_MARGIN:g}, "
            f"{self.wrong} wrong, {self.wrong_counts} requests of a wrong length"
        )


def judge(
    prompts: Sequence[list[int]],
    new_tokens: Sequence[int],
    answers: Sequence[list[int]],
    reference: Callable[[list[int], list[int]], torch.Tensor],
    *,
    margin: float = EXCUSED_MARGIN,
) -> Judgement:
    """Compare every token of the answers with the reference.

    Args:
        reference: (prompt, answer) -> logits before each token of the answer, `[len(answer), vocab]`; called in order,
            for answers that have tokens.
        margin: largest difference of logits that is no error; other data types than float32 need a larger one.
    """
    tokens = excused = wrong = wrong_counts = 0
    for prompt, wanted, answer in zip(prompts, new_tokens, answers, strict=True):
        wrong_counts += len(answer) != wanted
        if not answer:
            continue
        logits = reference(prompt, answer).double()
        chosen = logits.gather(1, torch.tensor(answer, device=logits.device).unsqueeze(1)).squeeze(1)
        gap = logits.amax(dim=1) - chosen
        tokens += len(answer)
        excused += int(((gap > 0) & (gap < margin)).sum())
        wrong += int((~(gap < margin)).sum())  # negated, so that NaN counts as wrong, too
    return Judgement(tokens=tokens, excused=excused, wrong=wrong, wrong_counts=wrong_counts)
