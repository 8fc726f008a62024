"""The cycle of round-robin allocation (rra): its controls, and the turns of its phases and micro-batches.

A cycle with three stages and two decode iterations:

    encode      decode 1    decode 2
    0  1  2     0  1  2     0  1  2        then the next cycle; each number is the turn of a micro-batch

Source: ExeGPT (ASPLOS '24), sections 4.1 and 5.2, Figure 4(a).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from orca.core.domain.errors import SettingError

DEFAULT_THRESHOLD_PERCENT = 12
"""Deviation from the planned workload that is left alone: the largest range in Table 7 of the paper is 11.8 %."""


RAISE_MAX = 2
"""Factor by which B_E may be raised at most, so a decode batch that is empty at the start fills up over some cycles.
Requests that entered all at once would also end all at once, and the next ones would again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleControls:
    """The controls of a cycle, and the workload that its plan expects. Without that workload nothing is adjusted."""

    encode_batch: int  # B_E: most requests that enter with an encode iteration; with decode_batch up to RAISE_MAX times
    decode_steps: int  # N_D: decode iterations between two encode iterations
    decode_batch: int | None = None  # planned B_D: requests at the start of a decode phase
    encode_tokens: int | None = None  # planned average of an encode iteration: tokens of its prompts, or of its sources
    threshold_percent: int = DEFAULT_THRESHOLD_PERCENT

    def __post_init__(self) -> None:
        """Raises: SettingError that names the control if it makes no sense by itself."""
        for name in ("encode_batch", "decode_steps", "decode_batch", "encode_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.threshold_percent <= 100:
            raise SettingError(f"threshold_percent must be from 0 to 100, not {self.threshold_percent}")

    def broken_rule(self, *, stages: int, max_batch_size: int) -> tuple[str, str] | None:
        """Return a control that could never be reached and the rule that it breaks; None if there is none.

        A request stays in its micro-batch, and a micro-batch runs in one step. So the micro-batches hold at most
        `stages` times `max_batch_size` requests, those of an encode iteration included.
        """
        most = stages * max_batch_size
        rule = f"at most {most}, the number of stages ({stages}) times max_batch_size ({max_batch_size})"
        for name in ("encode_batch", "decode_batch"):
            if (getattr(self, name) or 0) > most:
                return name, rule
        if self._is_above(self.encode_batch):
            return "encode_batch", (
                f"at most decode_batch ({self.decode_batch}) with its threshold of {self.threshold_percent} %:"
                " the decode batch includes those that enter"
            )
        return None

    def places(self, *, decoding: int, entered: int) -> int:
        """Return how many more requests may enter with an encode iteration, so that B_D stays as planned (5.2).

        Args:
            decoding: requests that will decode, those that entered with this encode iteration included.
            entered: requests that entered with this encode iteration.
        Returns: 0 or more. 0 is possible for a fresh encode iteration only while requests decode.
        """
        places = self.encode_batch - entered
        if self.decode_batch is not None and (
            self._is_above(decoding + places) or (decoding + places) * 100 < self.decode_batch * self._low_percent
        ):
            places = min(self.decode_batch - decoding, RAISE_MAX * self.encode_batch - entered)
        return max(places, 0 if decoding or entered else 1)

    def has_room(self, tokens: int) -> bool:
        """Return true if the prompts of an encode iteration may have so many tokens together."""
        return self.encode_tokens is None or tokens * 100 <= self.encode_tokens * (100 + self.threshold_percent)

    def describe(self) -> str:
        """Return the controls in force by name: `encode_batch 8, decode_steps 16`."""
        words = [f"encode_batch {self.encode_batch}", f"decode_steps {self.decode_steps}"]
        planned = [(name, getattr(self, name)) for name in ("decode_batch", "encode_tokens")]
        words += [f"{name} {value}" for name, value in planned if value is not None]
        if len(words) > 2:
            words.append(f"threshold_percent {self.threshold_percent}")
        return ", ".join(words)

    @property
    def _low_percent(self) -> int:
        return 100 - self.threshold_percent

    def _is_above(self, requests: int) -> bool:
        """Return true if a decode batch of so many requests is above its threshold."""
        high_percent = 100 + self.threshold_percent
        return self.decode_batch is not None and requests * 100 > self.decode_batch * high_percent


class CyclePhase(StrEnum):
    """The phases of a cycle."""

    ENCODE = "encode"  # new requests run all their known tokens, and draw their first one
    DECODE = "decode"  # all others run one token


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclePosition:
    """A micro-batch's turn in a cycle."""

    phase: CyclePhase = CyclePhase.ENCODE
    iteration: int = 1  # of the decode phase, from 1; an encode phase is one iteration
    microbatch: int = 0
    entered: int = 0  # requests that have entered with this encode iteration
    entered_tokens: int = 0  # those of their prompts, or of their sources

    @property
    def is_encoding(self) -> bool:
        return self.phase is CyclePhase.ENCODE

    def entering(self, requests: int, tokens: int) -> "CyclePosition":
        """Return the same turn with so many more requests, and tokens of them, in its encode iteration."""
        return replace(self, entered=self.entered + requests, entered_tokens=self.entered_tokens + tokens)

    def after(self, stages: int) -> "CyclePosition":
        """Return the turn after this one. Only `turns` knows where the decode phase ends."""
        if self.microbatch + 1 < stages:
            return replace(self, microbatch=self.microbatch + 1)
        iteration = 1 if self.is_encoding else self.iteration + 1
        return CyclePosition(phase=CyclePhase.DECODE, iteration=iteration)


CYCLE_START = CyclePosition()


def turns(
    position: CyclePosition, controls: CycleControls, *, stages: int, is_decoding: bool
) -> Iterator[CyclePosition]:
    """Yield the turns from a position on, at least one of each micro-batch in each phase that has requests.

    A shorter decode phase is in force from the next iteration on: one that has begun goes on through all micro-batches.

    Args: is_decoding: false if there is no request that decodes; the decode phase has no turns then.
    """
    for _ in range(4 * stages):
        is_over = position.microbatch == 0 and position.iteration > controls.decode_steps
        if not position.is_encoding and (is_over or not is_decoding):
            position = CYCLE_START
        yield position
        position = position.after(stages)
