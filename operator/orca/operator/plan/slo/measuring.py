"""The measured figures of the plan in force, and how they stand to the goal: pure."""

from orca.operator.domain.observation import Observation
from orca.operator.domain.resource import SloSpec
from orca.pool.length_bins import HALF_LIFE_S
from orca.pool.measured import MeasuredFigures, answer_figures


def measure(observation: Observation) -> MeasuredFigures | None:
    """Return the figures of the answers under the plan in force; None if there are none, or if they are unknown."""
    found, slo, latencies = observation.plan_in_force, observation.spec.slo, observation.pool.latencies
    if found is None or slo is None or latencies is None or not found.is_wanted or found.following is None:
        return None
    reading = found.following.reading
    if reading is None or reading.awake_ms > latencies.awake_ms or observation.is_another_known_in_force:
        return None
    return answer_figures(
        latencies,
        kind=slo.kind,
        percentile=slo.percentile,
        latency_ms=slo.latency_ms,
        before=reading,
        groups=max(1, observation.spec.wanted_groups),
        half_life_s=HALF_LIFE_S,
    )


def is_met(slo: SloSpec, measured: MeasuredFigures) -> bool:
    """Return whether measured figures meet the goal. The margin does not count: it is for plans."""
    bounds = (
        (measured.latency_s, slo.latency_ms),
        (measured.ttft_s, slo.ttft_ms),
        (measured.tpot_s, slo.tpot_ms),
    )
    return all(found is None or bound_ms is None or 1000 * found <= bound_ms for found, bound_ms in bounds)


def compare(slo: SloSpec, measured: MeasuredFigures) -> str:
    """Return measured figures beside the bounds of the goal, such as `measured 99 % in 7.65 s ..., bound 8 s`."""
    bound_s = slo.latency_ms / 1000
    speed = f"{measured.latency_s:.3g} s at {measured.throughput:.3g} requests/s"
    words = [f"measured {slo.percentile} % in {speed}, bound {bound_s:g} s"]
    further = (("first token in", measured.ttft_s, slo.ttft_ms), ("between tokens", measured.tpot_s, slo.tpot_ms))
    for name, found_s, bound_ms in further:
        if found_s is not None and bound_ms is not None:
            words.append(f"{name} {1000 * found_s:.3g} ms, bound {bound_ms} ms")
    return f"{'; '.join(words)}; from {measured.answers:,} answers"
