"""The goal of a plan: bounds on latency, and what they are measured on."""

from dataclasses import dataclass
from math import inf, isfinite
from typing import Protocol

from orca.core.domain.errors import BadValue

KINDS = ("sequence", "requests")
PERCENTILES = range(50, 100)


class ScheduleLatencies(Protocol):
    """The latencies of a schedule at the wanted percentile, in seconds: expected or measured ones."""

    @property
    def latency_s(self) -> float: ...

    @property
    def ttft_s(self) -> float: ...

    @property
    def tpot_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGoal:
    """The bounds of a plan. All hold at the same percentile.

    The kinds are the two agreements of ExeGPT (section 7.6). `sequence` is (b): the time from the first step to the
    last token, without queueing, of an answer whose length is the percentile. `requests` is (a): the percentile over
    all answers of the time from submission to last token, at a given arrival rate.
    """

    latency_ms: float  # infinite: no bound
    percentile: int = 99
    kind: str = "sequence"
    rate: float | None = None  # requests per second; for `requests` only, which needs it
    ttft_ms: float | None = None  # bound on the time to the first token
    tpot_ms: float | None = None  # bound on the mean time between two tokens of an answer
    margin_percent: float = 0.0  # every bound is tightened by so much

    def __post_init__(self) -> None:
        """Raises: BadValue that names the field."""
        for name in ("latency_ms", "ttft_ms", "tpot_ms", "rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadValue(name, f"{value:g} is not above 0")
        if self.percentile not in PERCENTILES:
            raise BadValue("percentile", f"{self.percentile} is not a whole number from 50 to 99")
        if self.kind not in KINDS:
            raise BadValue("kind", f"{self.kind!r} is not {' or '.join(KINDS)}")
        if self.kind == "requests" and self.rate is None:
            raise BadValue("rate", "missing: the latency of all requests depends on how many arrive")
        if self.kind == "sequence" and self.rate is not None:
            raise BadValue("rate", "no meaning for the kind sequence, which leaves queueing out")
        if not 0 <= self.margin_percent < 100:
            raise BadValue("margin_percent", f"{self.margin_percent:g} is not from 0 to below 100")

    def pressure(self, found: ScheduleLatencies) -> float:
        """Return the largest ratio of a latency to its bound: the goal is met up to 1. 0 without bounds."""
        margin = 1 - self.margin_percent / 100
        ratios = [
            1000 * latency_s / (bound * margin)
            for latency_s, bound in (
                (found.latency_s, self.latency_ms),
                (found.ttft_s, self.ttft_ms),
                (found.tpot_s, self.tpot_ms),
            )
            if bound is not None and isfinite(bound)
        ]
        # An endless queue breaks any goal, and none at all.
        ratios += [inf] if found.latency_s == inf else []
        return max(ratios, default=0.0)

    def is_met(self, found: ScheduleLatencies) -> bool:
        return self.pressure(found) <= 1.0

    def describe(self) -> str:
        """Return the goal in a few words, such as `99 % within 8 s`."""
        bounds = [f"{self.percentile} % within {self.latency_ms / 1000:g} s"] if isfinite(self.latency_ms) else []
        if self.ttft_ms is not None:
            bounds.append(f"first token within {self.ttft_ms:g} ms")
        if self.tpot_ms is not None:
            bounds.append(f"{self.tpot_ms:g} ms between tokens")
        text = ", ".join(bounds) or "no bound"
        if self.rate is not None:
            text += f", at {self.rate:g} requests/s"
        return text + (f", with a margin of {self.margin_percent:g} %" if self.margin_percent else "")
