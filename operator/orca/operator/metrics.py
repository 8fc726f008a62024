"""Prometheus metrics of the operator."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from orca.core.process.internal_port import Page
from orca.operator.plan_metrics import PlanMetrics

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class OperatorMetrics:
    """The metrics of one operator, in a registry of their own."""

    def __init__(
        self,
        waiting: Callable[[], float],
        heard_s: Callable[[], float],
        is_leader: Callable[[], float],
        refused: Callable[[], float],
        left: Callable[[], float],
    ) -> None:
        """
        Args:
            waiting: number of resources that wait for a reconcile.
            heard_s: seconds since the API server last listed the resources, or since a standby last read the Lease.
            is_leader: 1 for an operator that may write.
            refused: number of namespaces that the operator should serve and cannot list.
            left: number of resources that the operator leaves to another operator.
        """
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "orca_operator_reconciles", "Reconciles, by how they ended.", ["result"], registry=self.registry
        )
        self.seconds = Histogram(
            "orca_operator_reconcile_seconds", "Duration of one reconcile.", buckets=_SECONDS, registry=self.registry
        )
        self._gauge("orca_operator_queue_length", "Resources that wait for a reconcile.", waiting)
        self._gauge(
            "orca_operator_list_age_seconds",
            "Seconds since the resources were last listed, or on a standby since the Lease was last read.",
            heard_s,
        )
        self.watch_failures = Counter(
            "orca_operator_watch_failures",
            "Failures of the watches of a namespace. They begin again; regular lists find what they miss.",
            registry=self.registry,
        )
        self._gauge(
            "orca_operator_refused_namespaces",
            "Namespaces that the operator should serve and that the API server does not let it list.",
            refused,
        )
        self._gauge(
            "orca_operator_resources_of_others",
            "Resources that the operator leaves alone, since another operator serves them or is chosen for them.",
            left,
        )
        self._gauge("orca_operator_is_leader", "Whether it acts; 0 while it waits for the Lease.", is_leader)
        self.plans = PlanMetrics(self.registry)

    def page(self) -> Page:
        return Page(generate_latest(self.registry), CONTENT_TYPE_LATEST)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)
