"""Makes the steps of points, as a scheduler would send them. Pure."""

from dataclasses import dataclass, field

from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Claim, Epoch, NewRequest, Part, Row, Step
from orca.planner.profile.measuring.points import Point, View

EPOCH = Epoch(1, "profile")
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class PointSteps:
    """The steps of one view, in their order. Each point has requests of its own."""

    vocab_size: int
    encoder_decoder: EncoderDecoder | None
    _number: int = 0
    _handles: list[int] = field(default_factory=list)  # of the present point
    _next_handle: int = 1

    def first(self, point: Point) -> Step:
        """Return a step that frees the requests of the point before, brings those of this one, and runs its rows.

        The sources of the new requests run, too: attention would read one block for all of them otherwise.
        """
        freed = tuple(self._handles)
        self._handles = list(range(self._next_handle, self._next_handle + point.rows))
        self._next_handle += point.rows
        return self._step(point, freed=freed, new=tuple(self._new(handle, point) for handle in self._handles))

    def again(self, point: Point) -> Step:
        """Return the same rows once more: of new requests if the point's requests are new in its step."""
        return self.first(point) if point.enters else self._step(point)

    def _step(self, point: Point, freed: tuple[int, ...] = (), new: tuple[NewRequest, ...] = ()) -> Step:
        self._number += 1
        has_parts = self.encoder_decoder is not None
        rows: list[Row] = []
        if has_parts and new and (point.source > 1 or point.view is View.ENCODER):
            rows += [Row(handle, 0, point.source, False, part=Part.SOURCE) for handle in self._handles]
        if point.view is not View.ENCODER:
            part = Part.TARGET if has_parts else Part.UNSPECIFIED
            rows += [
                Row(handle, point.start, point.count, point.samples, self._input(handle, point), part=part)
                for handle in self._handles
            ]
        return Step(epoch=EPOCH, number=self._number, freed=freed, new=new, rows=tuple(rows))

    def _new(self, handle: int, point: Point) -> NewRequest:
        target = point.start + point.count
        prefix: tuple[int, ...] = ()
        known = target
        if self.encoder_decoder is not None:
            prefix = self.encoder_decoder.beginning()
            known = point.source + max(0, target - len(prefix))
        return NewRequest(
            handle=handle,
            request_id=f"profile-{handle}.0",
            claim=Claim(1, "profile/1"),
            tokens=tuple(self._token(handle + place) for place in range(known)),
            prompt_length=point.source if prefix else known,
            max_total_tokens=point.source + max(target, len(prefix)) + 1,
            sampling=_GREEDY,
            decoder_prefix=prefix,
        )

    def _input(self, handle: int, point: Point) -> int | None:
        """Return the token of a row of one token, which the master sends; None for a row of several."""
        return self._token(handle + self._number) if point.count == 1 else None

    def _token(self, number: int) -> int:
        """Return some token that is none of the special ones, which have the lowest ids."""
        low = min(8, self.vocab_size - 1)
        return low + number * 7919 % (self.vocab_size - low)
