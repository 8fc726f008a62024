"""Monitors, alerts and dashboard: they ask only for metrics and labels that are there."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from orca.gateway.metrics import GatewayMetrics
from orca.operator.cluster.watching import LIST_S
from orca.operator.domain import names
from orca.operator.metrics import OperatorMetrics
from orca.pool.records import CommitAnswer
from orca.scheduler.metrics import SchedulerMetrics
from orca.scheduler.observer import SchedulerLoad
from support.chart.rendering import CHART, EVERYTHING, PROMTOOL, needs_helm, needs_promtool, the

RULES_FILE = CHART / "monitoring" / "rules.yaml"
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]]
PANELS = yaml.safe_load((CHART / "monitoring" / "panels.yaml").read_text())
SUFFIXES = {
    "counter": ("_total", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
    "gauge": ("",),
}


def series() -> set[str]:
    """Names of all time series that gateways, schedulers and the operator offer."""
    scheduler = SchedulerMetrics("g", wall_ms=lambda: 0)
    scheduler.watch(SchedulerLoad, unformed_s=lambda: 0.0)
    operator = OperatorMetrics(lambda: 0.0, lambda: 0.0, lambda: 1.0, lambda: 0.0, lambda: 0.0)
    registries = [GatewayMetrics("m").registry, scheduler.registry, operator.registry]
    families = [family for registry in registries for family in registry.collect()]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def queries() -> dict[str, str]:
    """Every query by where it stands."""
    alerts = {rule["alert"]: rule["expr"] for rule in RULES}
    panels = {f"{panel['title']}: {legend}": query for panel in PANELS for legend, query in panel["queries"].items()}
    return alerts | panels


def pod_labels() -> set[str]:
    """Labels that the PodMonitor gives to every series of a pod."""
    [endpoint] = the("PodMonitor", EVERYTHING)["spec"]["podMetricsEndpoints"]
    return {each["targetLabel"] for each in endpoint["relabelings"]}


def test_every_query_uses_existing_series_and_labels() -> None:
    known = series() | {"orca_deployment", "orca_role"}
    for place, query in queries().items():
        assert set(re.findall(r"orca_\w+", query)) <= known, place


def test_the_alert_for_missed_lists_fires_after_more_than_the_health_check_allows() -> None:
    [deaf] = [rule["expr"] for rule in RULES if rule["alert"] == "OrcaOperatorDeaf"]
    assert float(deaf.rpartition("> ")[2]) > 4 * LIST_S


@needs_helm
def test_the_labels_of_queries_are_given_by_the_pod_monitor() -> None:
    assert pod_labels() == {"orca_deployment", "orca_role"}


@needs_helm
def test_the_pod_monitor_finds_gateways_and_schedulers_at_their_port() -> None:
    spec = the("PodMonitor", EVERYTHING)["spec"]
    [expression] = spec["selector"]["matchExpressions"]
    assert expression["key"] == names.ROLE_LABEL
    assert expression["values"] == [names.GATEWAY, names.SCHEDULER]
    assert spec["namespaceSelector"] == {"any": True}
    [endpoint] = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == ("metrics", "15s")


@needs_helm
def test_relabelings_read_the_labels_of_the_operators_pods() -> None:
    [endpoint] = the("PodMonitor", EVERYTHING)["spec"]["podMetricsEndpoints"]
    sources = [source for each in endpoint["relabelings"] for source in each["sourceLabels"]]
    wanted = [re.sub(r"[^a-z]", "_", label) for label in (names.DEPLOYMENT_LABEL, names.ROLE_LABEL)]
    assert sources == [f"__meta_kubernetes_pod_label_{label}" for label in wanted]


@needs_helm
def test_monitors_select_only_the_served_namespaces() -> None:
    monitor = the("PodMonitor", EVERYTHING | {"namespaces": ["a", "b"]})
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


@needs_helm
@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor", "PrometheusRule"])
def test_prometheus_finds_its_objects_by_labels(kind: str) -> None:
    assert the(kind, EVERYTHING)["metadata"]["labels"]["release"] == "prometheus"


@needs_helm
def test_the_time_between_scrapes_can_be_set() -> None:
    values = {"monitoring": {"serviceMonitor": True, "podMonitor": True, "scrapeSeconds": 60}}
    assert the("ServiceMonitor", values)["spec"]["endpoints"][0]["interval"] == "60s"
    assert the("PodMonitor", values)["spec"]["podMetricsEndpoints"][0]["interval"] == "60s"


@needs_helm
def test_the_service_monitor_scrapes_the_operator() -> None:
    [endpoint] = the("ServiceMonitor", EVERYTHING)["spec"]["endpoints"]
    assert endpoint["port"] == the("Service")["spec"]["ports"][0]["name"]
    assert endpoint["relabelings"] == [{"targetLabel": "orca_role", "replacement": "operator"}]
    assert endpoint["honorLabels"], "a plan has the namespace of its resource, not that of the operator"


@needs_helm
def test_the_rules_are_the_file_as_it_stands() -> None:
    assert the("PrometheusRule", EVERYTHING)["spec"] == yaml.safe_load(RULES_FILE.read_text())


@needs_helm
def test_an_alert_can_be_left_out() -> None:
    values = {"monitoring": {"rules": {"enabled": True, "disabled": ["OrcaPartDown"]}}}
    [group] = the("PrometheusRule", values)["spec"]["groups"]
    assert {rule["alert"] for rule in RULES} - {rule["alert"] for rule in group["rules"]} == {"OrcaPartDown"}


def test_every_alert_has_a_severity_and_an_action() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["alert"].startswith("Orca")


def test_the_counted_refusal_of_commits_is_an_answer_of_the_pool() -> None:
    assert f'answer="{CommitAnswer.NOT_YOURS}"' in queries()["OrcaCommitsRefused"]


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(the("ConfigMap", EVERYTHING)["data"]["orca.json"])
    return loaded


@needs_helm
def test_no_two_panels_of_the_dashboard_overlap() -> None:
    panels = dashboard()["panels"]
    assert [panel["title"] for panel in panels] == [panel["title"] for panel in PANELS]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(PANELS)
    assert {x for x, _ in places} == {0, 8, 16}


@needs_helm
def test_the_dashboards_queries_use_its_variables() -> None:
    variables = {each["name"] for each in dashboard()["templating"]["list"]}
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            assert 'namespace=~"$namespace",orca_deployment=~"$deployment"' in target["expr"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"} <= variables


@needs_helm
def test_the_queries_of_a_panel_have_distinct_letters() -> None:
    for panel in dashboard()["panels"]:
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == list("ABC"[: len(letters)])


@needs_helm
def test_parts_of_a_whole_are_stacked_and_only_signed_values_may_be_below_zero() -> None:
    for panel, source in zip(dashboard()["panels"], PANELS, strict=True):
        defaults = panel["fieldConfig"]["defaults"]
        assert ("min" in defaults) != source.get("signed", False), source["title"]
        stacking = defaults.get("custom", {}).get("stacking", {"mode": "none"})
        assert (stacking["mode"] == "normal") == source.get("stacked", False), source["title"]


@needs_helm
def test_grafana_finds_the_dashboard_by_its_label() -> None:
    values = {"monitoring": {"dashboard": {"enabled": True, "labels": {"team": "serving"}}}}
    assert the("ConfigMap", EVERYTHING)["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert the("ConfigMap", values)["metadata"]["labels"]["team"] == "serving"


def promtool(*words: str | Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_are_valid_and_fire_when_they_should() -> None:
    promtool("check", "rules", RULES_FILE)
    promtool("test", "rules", Path(__file__).parent / "rules_test.yaml")


@needs_promtool
def test_the_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    texts = [query.replace("$of", 'namespace=~"a"') for query in queries().values()]
    rules = [
        {"record": f"panel:{index}", "expr": text.replace("$__rate_interval", "5m")} for index, text in enumerate(texts)
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", file)
