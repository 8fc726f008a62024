"""The table of vLLM's metrics: complete, true to vLLM's types and labels, and the one that the documentation shows."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from orca.core.domain.request import FinishReason
from orca.core.domain.step import Epoch
from orca.core.metrics.vllm_names import FINISHED_REASONS, MISSING, SAME_MEANING, VLLM_VERSION, Exporter
from orca.gateway.metrics import GatewayMetrics
from orca.scheduler.metrics import SchedulerMetrics
from orca.scheduler.observer import SchedulerLoad

READERS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "vllm_readers.yaml").read_text())
VLLM_KINDS: Mapping[str, str] = READERS["vllm"]["metrics"]
MONITORING = Path(__file__).parents[3] / "docs" / "operations" / "monitoring.md"
ABSENT = {name for row in MISSING for name in row.names}
BOTH = ("orca", "vllm")


def gateway(*names: str) -> GatewayMetrics:
    return GatewayMetrics("m", names)


def scheduler(*names: str) -> SchedulerMetrics:
    metrics = SchedulerMetrics("g0", wall_ms=lambda: 0, model_name="m", names=names, block_tokens=16, dtype="bfloat16")
    metrics.watch(
        lambda: SchedulerLoad(running=3, waiting=7, slots=64, slots_reserved=16), unformed_s=lambda: 0.0, loop=None
    )
    metrics.formed(Epoch(number=1, holder="s"), 100, "")
    return metrics


def families(page: bytes) -> dict[str, Metric]:
    """Return the families of a page; those of creation times are left out."""
    found = {family.name: family for family in text_string_to_metric_families(page.decode())}
    return {name: family for name, family in found.items() if not name.endswith("_created")}


def exported(exporter: Exporter) -> dict[str, Metric]:
    metrics = gateway("vllm") if exporter is Exporter.GATEWAY else scheduler("vllm")
    return families(metrics.page() if isinstance(metrics, GatewayMetrics) else metrics.page().body)


def series() -> set[str]:
    """Return the names of all series that gateways and schedulers have under vLLM's names."""
    return {sample.name for exporter in Exporter for family in exported(exporter).values() for sample in family.samples}


def value(family: Metric, **labels: str) -> float:
    [sample] = [each for each in family.samples if labels.items() <= each.labels.items()]
    return float(sample.value)


def test_the_table_names_every_metric_of_vllm_once() -> None:
    assert READERS["vllm"]["version"] == VLLM_VERSION
    named = Counter([row.vllm for row in SAME_MEANING] + [name for row in MISSING for name in row.names])
    assert named == Counter(dict.fromkeys(VLLM_KINDS, 1))


@pytest.mark.parametrize("exporter", Exporter)
def test_a_part_exports_its_rows_of_the_table_with_vllms_types_and_no_other(exporter: Exporter) -> None:
    kinds = {name: family.type for name, family in exported(exporter).items()}
    assert kinds == {row.vllm: VLLM_KINDS[row.vllm] for row in SAME_MEANING if row.exporter is exporter}


@pytest.mark.parametrize("exporter", Exporter)
def test_every_sample_has_vllms_labels(exporter: Exporter) -> None:
    more = {"vllm:request_success": {"finished_reason"}}
    engine = "0" if exporter is Exporter.GATEWAY else "g0"
    for name, family in exported(exporter).items():
        for sample in family.samples:
            if name != "vllm:cache_config_info":
                assert sample.labels.keys() - {"le"} == {"model_name", "engine"} | more.get(name, set())
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", engine)


def test_both_names_have_the_same_value() -> None:
    metrics = gateway(*BOTH)
    metrics.time_to_first_token.observe(0.3)
    metrics.prompt_tokens_total.inc(5)
    found = families(metrics.page())
    for row in SAME_MEANING:
        if row.exporter is Exporter.GATEWAY and row.vllm != "vllm:request_success":
            pairs = zip(found[row.orca].samples, found[row.vllm].samples, strict=True)
            assert all(ours.value == theirs.value for ours, theirs in pairs), row.vllm
    assert value(found["vllm:prompt_tokens"]) == 5


def test_several_reasons_of_ours_add_up_to_one_of_vllms() -> None:
    metrics = gateway("vllm")
    for reason in (FinishReason.CANCELLED, FinishReason.DEADLINE_EXCEEDED, FinishReason.STOP, FinishReason.REFUSED):
        metrics.count_end(reason)
    ends = families(metrics.page())["vllm:request_success"]
    found = {
        each.labels["finished_reason"]: each.value for each in ends.samples if each.name == "vllm:request_success_total"
    }
    assert found == {"stop": 1, "length": 0, "abort": 2, "error": 1}


def test_every_reason_of_ours_is_one_of_vllms() -> None:
    assert FINISHED_REASONS.keys() == set(FinishReason)


def test_the_gauges_of_a_group_have_its_load() -> None:
    found = families(scheduler("vllm").page().body)
    assert value(found["vllm:num_requests_running"]) == 3
    assert value(found["vllm:kv_cache_usage_perc"]) == 0.25


def test_the_cache_is_described_as_long_as_the_group_is_formed() -> None:
    metrics = scheduler(*BOTH)
    [info] = families(metrics.page().body)["vllm:cache_config_info"].samples
    sizes = {"block_size": "16", "num_gpu_blocks": "6", "kv_cache_size_tokens": "100", "cache_dtype": "bfloat16"}
    assert (info.labels, info.value) == ({"model_name": "m", "engine": "g0"} | sizes, 1)
    metrics.broke(Epoch(number=1, holder="s"), "")
    assert not families(metrics.page().body)["vllm:cache_config_info"].samples


def test_only_the_names_that_are_asked_for_are_exported() -> None:
    for page in (gateway("orca").page(), scheduler("orca").page().body):
        assert all(name.startswith("orca_") for name in families(page))
    for page in (gateway("vllm").page(), scheduler("vllm").page().body):
        assert all(name.startswith("vllm:") for name in families(page))


def test_inference_perf_finds_what_it_reads_but_for_the_rows_that_say_why_not() -> None:
    wanted: Mapping[str, str] = READERS["inference_perf"]["metrics"]
    found = {name: family.type for exporter in Exporter for name, family in exported(exporter).items()}
    assert {name: kind for name, kind in wanted.items() if name not in ABSENT} == {
        name: kind for name, kind in found.items() if name in wanted
    }
    # These are its fields for every kind of server.
    common = ("prompt_tokens", "generation_tokens", "request_success", "e2e_request_latency_seconds")
    others = ("num_requests_waiting", "request_time_per_output_token_seconds")
    assert {f"vllm:{name}" for name in (*common, *others)} <= found.keys()


@pytest.mark.parametrize("dashboard", READERS["dashboards"], ids=lambda dashboard: dashboard["title"])
def test_the_documentation_says_which_panels_of_a_dashboard_show_data(dashboard: Mapping[str, Any]) -> None:
    panels: Mapping[str, list[str]] = dashboard["panels"]
    shown = [title for title, names in panels.items() if set(names) <= series()]
    assert all(not series() & set(names) for title, names in panels.items() if title not in shown)
    [row] = [line for line in MONITORING.read_text().splitlines() if line.startswith(f"| [{dashboard['title']}](")]
    _, _, with_data, without, _ = row.split("|")
    assert with_data.strip() == ", ".join(shown)
    assert all(title in without for title in panels if title not in shown)
