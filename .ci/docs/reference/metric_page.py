"""The page of metrics, from the registries of gateway, scheduler and operator."""

import asyncio

from prometheus_client import CollectorRegistry

from orca.gateway.metrics import GatewayMetrics
from orca.operator.metrics import OperatorMetrics
from orca.scheduler.metrics import SchedulerMetrics
from orca.scheduler.observer import SchedulerLoad
from reference.tables import code, sentence, table

_HEAD = """# Metrics

Prometheus metrics, at `/metrics` of each part. A histogram `NAME` has the series `NAME_bucket`, `NAME_sum` and
`NAME_count`. Stages have no metrics of their own: the scheduler measures their steps.

"""


def page() -> str:
    scheduler = SchedulerMetrics("group-0", lambda: 0)
    loop = asyncio.new_event_loop()
    scheduler.watch(SchedulerLoad, unformed_s=lambda: 0.0, loop=loop)
    loop.close()
    operator = OperatorMetrics(lambda: 0.0, lambda: 0.0, lambda: 0.0, lambda: 0.0, lambda: 0.0)
    return (
        _HEAD
        + _section("Gateway", GatewayMetrics("model").registry)
        + "Every gateway reports the same values for the pool (`orca_pool_...`). Join them with `max`.\n\n"
        + _section("Scheduler", scheduler.registry)
        + _section("Operator", operator.registry)
    )


def _section(title: str, registry: CollectorRegistry) -> str:
    rows = []
    for metric in registry._collector_to_names:
        kind = metric._type  # type: ignore[attr-defined]
        name = metric._name + ("_total" if kind == "counter" else "")  # type: ignore[attr-defined]
        labels = ", ".join(map(code, metric._labelnames))  # type: ignore[attr-defined]
        rows.append([code(name), f"{kind}\n{labels}" if labels else kind, sentence(metric._documentation)])  # type: ignore[attr-defined]
    return f"## {title}\n\n" + table(["Metric", "Type and labels", "Meaning"], sorted(rows))
