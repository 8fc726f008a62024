"""Prometheus metrics of the operator."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from orca.core.process.internal_port import Page

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class Metrics:
    """One registry per operator."""

    def __init__(
        self, waiting: Callable[[], float], heard_s: Callable[[], float], is_leader: Callable[[], float]
    ) -> None:
        """
        Args:
            waiting: resources that wait for a look.
            heard_s: seconds since the API server last listed the resources, or showed the Lease to one that waits.
            is_leader: 1 for an operator that may write.
        """
        self.registry = CollectorRegistry()
        self.looks = Counter(
            "orca_operator_reconciles", "Looks at a resource, by how they ended.", ["result"], registry=self.registry
        )
        self.seconds = Histogram(
            "orca_operator_reconcile_seconds", "Duration of one look.", buckets=_SECONDS, registry=self.registry
        )
        self._gauge("orca_operator_queue_length", "Resources that wait for a look.", waiting)
        self._gauge(
            "orca_operator_list_age_seconds", "Since the resources, or the Lease waited for, were last read.", heard_s
        )
        self._gauge("orca_operator_is_leader", "Whether it acts; 0 while it waits for the Lease.", is_leader)

    def page(self) -> Page:
        return Page(generate_latest(self.registry), CONTENT_TYPE_LATEST)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)
