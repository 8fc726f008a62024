"""The page of metrics, from the registries of gateway, scheduler and operator."""

import asyncio

from prometheus_client import CollectorRegistry

from orca.core.metrics.vllm_names import MISSING, SAME_MEANING, VLLM_VERSION, SameMeaning
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
        + _vllm()
    )


_VLLM_HEAD = f"""## Under vLLM's names

With `--metric-names orca,vllm`, gateways and schedulers also export metrics of equal meaning under the names of vLLM
{VLLM_VERSION}. These have vLLM's labels: `model_name`, and `engine`, which is `0` at a gateway and the group's name at
a scheduler. Each name comes from one part only, so scrape both parts.

"""


def _vllm() -> str:
    # Schedulers have no counter under a name of vLLM.
    counters = {metric.name for metric in GatewayMetrics("model").registry.collect() if metric.type == "counter"}
    same = [
        [
            code(_series(row.vllm, row, counters)),
            f"{row.exporter}\n{code(_series(row.orca, row, counters))}",
            sentence(row.note),
        ]
        for row in SAME_MEANING
    ]
    missing = [[", ".join(map(code, row.names)), sentence(row.reason)] for row in MISSING]
    return (
        _VLLM_HEAD
        + table(["vLLM", "Part and Orca's name", "Differences"], same)
        + "Metrics of vLLM that Orca does not export:\n\n"
        + table(["vLLM", "Reason"], missing)
        + "Metrics of vLLM's speculative decoding and of its connectors are missing, too. Names that vLLM itself has"
        " removed, such as\n`vllm:gpu_cache_usage_perc` and `vllm:time_per_output_token_seconds`, are not exported.\n"
    )


def _series(name: str, row: SameMeaning, counters: set[str]) -> str:
    """Return one of the row's names as queries have it: that of a counter ends with _total."""
    return name + ("_total" if row.orca in counters else "")


def _section(title: str, registry: CollectorRegistry) -> str:
    rows = []
    for metric in registry._collector_to_names:
        kind = metric._type  # type: ignore[attr-defined]
        name = metric._name + ("_total" if kind == "counter" else "")  # type: ignore[attr-defined]
        labels = ", ".join(map(code, metric._labelnames))  # type: ignore[attr-defined]
        rows.append([code(name), f"{kind}\n{labels}" if labels else kind, sentence(metric._documentation)])  # type: ignore[attr-defined]
    return f"## {title}\n\n" + table(["Metric", "Type and labels", "Meaning"], sorted(rows))
