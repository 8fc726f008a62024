"""Values that Helm refuses, each with its name."""

from typing import Any

import pytest

from support.chart.rendering import CHART, Refused, needs_helm, render
from values_table import read_values

VALUES = (CHART / "values.yaml").read_text()


@needs_helm
@pytest.mark.parametrize("path", [*(value.path for value in read_values(VALUES)), "images", "monitoring.rules"])
def test_a_wrong_name_beside_a_value_is_refused_by_name(path: str) -> None:
    *parents, last = path.split(".")
    values: Any = {f"{last}Mistyped": 1}
    for parent in reversed(parents):
        values = {parent: values}
    with pytest.raises(Refused, match=f"{'/'.join(parents)}.*'{last}Mistyped' not allowed"):
        render(values)


@needs_helm
@pytest.mark.parametrize("path", [value.path for value in read_values(VALUES)])
def test_a_wrong_type_is_refused_with_the_name_of_the_value(path: str) -> None:
    values: Any = 1.5
    for name in reversed(path.split(".")):
        values = {name: values}
    with pytest.raises(Refused, match=f"/{path.replace('.', '/')}'"):
        render(values)


@needs_helm
@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"operator": {"resyncSeconds": 4}}, "/operator/resyncSeconds"),
        ({"operator": {"logLevel": "loud"}}, "/operator/logLevel"),
        ({"operator": {"resources": {"limits": {"memory": "1 GB"}}}}, "/operator/resources/limits/memory"),
        ({"operator": {"tolerations": [{"keys": "a"}]}}, "/operator/tolerations/0"),
        ({"images": {"pullPolicy": "Sometimes"}}, "/images/pullPolicy"),
        ({"images": {"registry": "example.com/"}}, "/images/registry"),
        ({"images": {"registry": "https://example.com/orca"}}, "/images/registry"),
        ({"images": {"registry": "example.com/Upper"}}, "/images/registry"),
        ({"images": {"worker": ""}}, "/images/worker"),
        ({"serviceAccount": {"name": "Not_A_Name"}}, "/serviceAccount/name"),
        ({"namespaces": ["Upper"]}, "/namespaces/0"),
        ({"namespaces": ["a", "a"]}, "/namespaces"),
        ({"networkPolicies": {"operatorEgressPorts": [0]}}, "/networkPolicies/operatorEgressPorts/0"),
        ({"networkPolicies": {"dnsPorts": [65536]}}, "/networkPolicies/dnsPorts/0"),
        # The operator would refuse an empty list, and not start.
        ({"networkPolicies": {"dnsPorts": []}}, "/networkPolicies/dnsPorts"),
        ({"monitoring": {"labels": {"a": 1}}}, "/monitoring/labels/a"),
        ({"nameOverride": "a.b"}, "/nameOverride"),
        ({"fullnameOverride": "1a"}, "/fullnameOverride"),
        ({"fullnameOverride": "a" * 64}, "/fullnameOverride"),
        ({"commonLabels": {"team": "a b"}}, "/commonLabels/team"),
        ({"commonLabels": {"a b": "team"}}, "/commonLabels"),
        ({"commonAnnotations": {"a/b/c": "note"}}, "/commonAnnotations"),
        ({"operator": {"affinity": {"nodes": {}}}}, "/operator/affinity"),
        ({"operator": {"topologySpreadConstraints": [{"maxSkew": 1}]}}, "/operator/topologySpreadConstraints/0"),
        ({"operator": {"extraEnv": [{"value": "a"}]}}, "/operator/extraEnv/0"),
        ({"operator": {"extraEnv": [{"name": "A", "value": 1}]}}, "/operator/extraEnv/0/value"),
        (
            {"operator": {"extraEnv": [{"name": "A", "value": "a", "valueFrom": {"fieldRef": {}}}]}},
            "/operator/extraEnv/0",
        ),
        ({"operator": {"extraVolumes": [{"name": "a"}]}}, "/operator/extraVolumes/0"),
        (
            {"operator": {"extraVolumeMounts": [{"name": "a", "mountPath": "etc"}]}},
            "/operator/extraVolumeMounts/0/mountPath",
        ),
        ({"operator": {"podSecurityContext": {"runAsUser": "root"}}}, "/operator/podSecurityContext/runAsUser"),
        ({"operator": {"securityContext": {"fsGroup": 1}}}, "/operator/securityContext"),
        ({"operator": {"revisionHistoryLimit": -1}}, "/operator/revisionHistoryLimit"),
        ({"operator": {"priorityClassName": "a: b"}}, "/operator/priorityClassName"),
        ({"operator": {"nodeSelector": {"a b": "c"}}}, "/operator/nodeSelector"),
        ({"operator": {"resources": {"requests": {"cpu": -1}}}}, "/operator/resources/requests/cpu"),
        ({"operator": {"podSecurityContext": {"runAsUser": 2**31}}}, "/operator/podSecurityContext/runAsUser"),
        ({"commonLabels": {"a..b/team": "c"}}, "/commonLabels"),
        ({"serviceAccount": {"annotations": {"a b": "c"}}}, "/serviceAccount/annotations"),
        ({"monitoring": {"labels": {"a": "b c"}}}, "/monitoring/labels/a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_is_refused_with_its_place(values: dict[str, Any], place: str) -> None:
    with pytest.raises(Refused, match=f"'{place}'"):
        render(values)


@needs_helm
@pytest.mark.parametrize("part", ["crds", "images", "operator", "serviceAccount", "monitoring"])
def test_a_missing_part_of_the_values_is_refused_by_name(part: str) -> None:
    with pytest.raises(Refused, match=f"missing property '{part}'"):
        render({part: None})


@needs_helm
@pytest.mark.parametrize(
    "path",
    [
        "crds.install",
        "images.worker",
        "images.pullPolicy",
        "operator.logLevel",
        "operator.resyncSeconds",
        "operator.revisionHistoryLimit",
        "serviceAccount.create",
        "rbac.create",
        "rbac.aggregate",
        "networkPolicies.deployments",
        "networkPolicies.dnsPorts",
        "monitoring.scrapeSeconds",
        "monitoring.rules",
        "monitoring.dashboard.enabled",
    ],
)
def test_null_for_a_value_without_an_empty_form_is_refused_by_name(path: str) -> None:
    """Helm takes null for "no such value", and the templates would read it as false, 0 or an empty text."""
    *parents, last = path.split(".")
    values: Any = {last: None}
    for parent in reversed(parents):
        values = {parent: values}
    with pytest.raises(Refused, match=f"'/{'/'.join(parents)}': missing property '{last}'"):
        render(values)


@needs_helm
def test_an_alert_that_does_not_exist_cannot_be_left_out() -> None:
    with pytest.raises(Refused, match="no alert named OrcaMistyped"):
        render({"monitoring": {"rules": {"enabled": True, "disabled": ["OrcaMistyped"]}}})


@needs_helm
def test_a_chart_that_contains_this_one_may_set_global_values() -> None:
    assert render({"global": {"imageRegistry": "example.com"}}) == render()
