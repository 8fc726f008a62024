"""Takes the requests that cannot be run out of the steps of an epoch, before anything else sees them.

Every rank of every stage screens each step when its message arrives, before it posts the receive of its activations.
The decision depends on the request and the model alone (core.domain.refusal). So all ranks leave out the same rows: the
tensors between them have the same sizes, no rank reserves slots, and only the last stage reports the refusal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orca.core.domain.refusal import ModelBounds, refusal_of
from orca.core.domain.step import Refused, Step
from orca.worker.models.build import StageModel


@dataclass(frozen=True, slots=True)
class ScreenedStep:
    """A step without the requests that are refused."""

    step: Step
    refused: tuple[Refused, ...] = ()  # one for each row that was left out


class RequestScreen:
    """The screen of one epoch on one rank. It sees all steps, in their order."""

    def __init__(self, bounds: ModelBounds) -> None:
        self._bounds = bounds
        self._reasons: dict[int, str] = {}  # by handle, until the request is freed

    @classmethod
    def of(cls, model: StageModel, eos_token_ids: Sequence[int]) -> "RequestScreen":
        """Return a screen with the bounds of a model, which are the same on all ranks."""
        return cls(
            ModelBounds(
                vocab_size=model.config.vocab_size,
                positions=model.positions,
                eos_token_ids=tuple(eos_token_ids),
                encoder_decoder=model.info.encoder_decoder,
            )
        )

    def screen(self, step: Step) -> ScreenedStep:
        """Leave out the requests that are refused, from the step that brings them to the step that frees them."""
        for new in step.new:
            reason = refusal_of(new, self._bounds)
            if reason is not None:
                self._reasons[new.handle] = reason
        if not self._reasons:
            return ScreenedStep(step)
        reasons = self._reasons
        refused = tuple(Refused(row.handle, reasons[row.handle]) for row in step.rows if row.handle in reasons)
        screened = replace(
            step,
            freed=tuple(handle for handle in step.freed if handle not in reasons),
            kept=tuple(handle for handle in step.kept if handle not in reasons),
            evicted=tuple(kept for kept in step.evicted if kept.handle not in reasons),
            new=tuple(new for new in step.new if new.handle not in reasons),
            rows=tuple(row for row in step.rows if row.handle not in reasons),
        )
        for handle in (*step.freed, *step.kept):
            reasons.pop(handle, None)
        return ScreenedStep(screened, refused)
