"""Measures how long requests are in prefill and in decode, from the steps that a scheduler reads."""

from dataclasses import dataclass

from prometheus_client import Histogram

from orca.core.domain.request import FinishReason, Request
from orca.core.domain.step import Epoch
from orca.scheduler.observer import IterationRecord, Observer
from orca.scheduler.policy.batch import GroupRequest


@dataclass(slots=True)
class _Times:
    """Times of a request on the loop's clock, in nanoseconds."""

    started_ns: int  # submit of its first step
    first_token_ns: int | None = None


class RequestPhases(Observer):
    """Observes prefill, decode and their sum when a request ends.

    Only steps of the initiation phase cost time here. A request is left out if its phases were not seen whole: its
    claim brought tokens of an earlier one, the pool ended it, or its epoch broke.
    """

    def __init__(self, prefill: Histogram, decode: Histogram, inference: Histogram) -> None:
        self._prefill = prefill
        self._decode = decode
        self._inference = inference
        self._times: dict[str, _Times] = {}
        # Ends are decided while a step's result is read, and `iterated` follows with its time.
        self._ended: list[str] = []

    def broke(self, epoch: Epoch, reason: str) -> None:  # noqa: ARG002 - an observer's shape
        self._times.clear()
        self._ended.clear()

    def ended(self, request: Request, reason: FinishReason, tokens: int) -> None:  # noqa: ARG002 - an observer's shape
        self._ended.append(request.id)

    def iterated(self, record: IterationRecord) -> None:
        for row in record.batch.rows:
            if row.is_of_prompt and not _is_resumed(row.request):
                times = self._times.setdefault(row.request.request.id, _Times(record.submitted_ns))
                if row.sample:
                    times.first_token_ns = record.returned_ns
        for request_id in self._ended:
            times_of_ended = self._times.pop(request_id, None)
            if times_of_ended is not None and times_of_ended.first_token_ns is not None:
                self._observe(times_of_ended.started_ns, times_of_ended.first_token_ns, record.returned_ns)
        self._ended.clear()
        for entry in record.batch.freed:
            self._times.pop(entry.request.id, None)

    def _observe(self, started_ns: int, first_token_ns: int, ended_ns: int) -> None:
        self._prefill.observe((first_token_ns - started_ns) / 1e9)
        self._decode.observe((ended_ns - first_token_ns) / 1e9)
        self._inference.observe((ended_ns - started_ns) / 1e9)


def _is_resumed(entry: GroupRequest) -> bool:
    """Return whether the request had tokens when it was claimed."""
    return len(entry.known) > len(entry.request.decoder_prefix or entry.request.prompt)
