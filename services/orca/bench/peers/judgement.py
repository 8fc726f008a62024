"""Are greedy tokens right? Each one is held against the logits of a reference that has read the same tokens before it.

Reading the answer's own tokens (and not the reference's) keeps the judgement of a token independent of what became of
earlier ones: a near-tie that went the other way excuses itself only, not the rest of the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

EXCUSED_MARGIN = 1e-4
"""Float32 sums in another order differ by so much: a token whose logit is this close to the largest is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a reference says about the answers to a workload."""

    tokens: int  # judged
    excused: int  # not the reference's own choice, but within the margin of it
    wrong: int  # neither
    wrong_counts: int  # requests that have not exactly as many tokens as asked for

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
    """Hold every token of the answers against the reference.

    Args:
        reference: (prompt, answer) -> logits before each token of the answer, `[len(answer), vocab]`; asked in order,
            of answers that have tokens.
        margin: that is no error, where the answers are not of float32.
    """
    tokens = excused = wrong = wrong_counts = 0
    for prompt, wanted, answer in zip(prompts, new_tokens, answers, strict=True):
        wrong_counts += len(answer) != wanted
        if not answer:
            continue
        logits = reference(prompt, answer).double()
        chosen = logits.gather(1, torch.tensor(answer, device=logits.device).unsqueeze(1)).squeeze(1)
        behind = logits.amax(dim=1) - chosen
        tokens += len(answer)
        excused += int(((behind > 0) & (behind < margin)).sum())
        wrong += int((~(behind < margin)).sum())  # which logits that are no numbers are, too
    return Judgement(tokens=tokens, excused=excused, wrong=wrong, wrong_counts=wrong_counts)
