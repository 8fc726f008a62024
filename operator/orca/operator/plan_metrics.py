"""Prometheus metrics of the plans for spec.slo, from the status of each resource.

The status is the truth: these values are those that it had at the last reconcile.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from orca.operator.domain.objects import condition_status
from orca.operator.plan.slo.conditions import SLO_MET
from orca.operator.plan.slo.plan_status import read_plan_status

_OF = ("namespace", "orca_deployment")
_FIGURES = ("predicted", "measured")
_LENGTHS = {
    "prompt_mean": "promptMeanPercent",
    "output_mean": "outputMeanPercent",
    "output_p99": "outputP99Percent",
}

Series = tuple[Gauge, tuple[str, ...]]
"""A metric, and the values of its labels."""


class PlanMetrics:
    """The metrics of all plans. A value that is unknown has no series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._latency = Gauge(
            "orca_plan_latency_seconds",
            "Latency of an answer at the percentile of the goal: predicted by the plan in force, and measured.",
            [*_OF, "figure"],
            registry=registry,
        )
        self._throughput = Gauge(
            "orca_plan_requests_per_second",
            "Requests per second of a group: most that the plan in force predicts, and measured.",
            [*_OF, "figure"],
            registry=registry,
        )
        self._drift = Gauge(
            "orca_plan_length_drift_ratio",
            "Lengths of requests at the last check over those that the plan was made for.",
            [*_OF, "length"],
            registry=registry,
        )
        self._met = Gauge(
            "orca_plan_slo_met", "Whether the goal is met: the condition SloMet.", list(_OF), registry=registry
        )
        self._known: dict[tuple[str, str], set[Series]] = {}

    def note(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Take the values of a resource from its status."""
        key, values = (namespace, name), dict(self._values((namespace, name), status))
        self._remove(self._known.pop(key, set()) - values.keys())
        for (gauge, labels), value in values.items():
            gauge.labels(*labels).set(value)
        if values:
            self._known[key] = set(values)

    def forget(self, namespace: str, name: str) -> None:
        """Remove the values of a resource that is gone, or that another operator serves."""
        self._remove(self._known.pop((namespace, name), set()))

    def keep(self, keys: Set[tuple[str, str]]) -> None:
        """Remove the values of all other resources."""
        for namespace, name in self._known.keys() - keys:
            self.forget(namespace, name)

    def _values(self, key: tuple[str, str], status: Mapping[str, Any]) -> Iterator[tuple[Series, float]]:
        shown = read_plan_status(status)
        for figure in _FIGURES:
            figures = shown.get(figure, {})
            if "latencyMs" in figures:
                yield (self._latency, (*key, figure)), figures["latencyMs"] / 1000
            if "requestsPerMinute" in figures:
                yield (self._throughput, (*key, figure)), figures["requestsPerMinute"] / 60
        for length, field in _LENGTHS.items():
            if field in shown.get("drift", {}):
                yield (self._drift, (*key, length)), 1 + shown["drift"][field] / 100
        met = condition_status({"status": status}, SLO_MET)
        if met in ("True", "False"):
            yield (self._met, key), float(met == "True")

    def _remove(self, series: Iterable[Series]) -> None:
        for gauge, labels in series:
            gauge.remove(*labels)
