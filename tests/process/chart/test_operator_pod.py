"""The operator's pod, option by option."""

from typing import Any

import pytest

from orca.operator.settings import parse_settings
from support.chart.rendering import Manifest, Refused, needs_helm, the

pytestmark = needs_helm


def pod(values: dict[str, Any] | None = None) -> Manifest:
    spec: Manifest = the("Deployment", values)["spec"]["template"]["spec"]
    return spec


def container(values: dict[str, Any] | None = None) -> Manifest:
    [found] = pod(values)["containers"]
    assert isinstance(found, dict)
    return found


def environment(values: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the variables, with the pod's name where Kubernetes fills it in."""
    filled = {"metadata.name": "orca-operator-1a-2b"}
    return {
        each["name"]: each["value"] if "value" in each else filled[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container(values)["env"]
    }


def test_one_operator_runs_and_the_old_one_ends_first() -> None:
    spec = the("Deployment")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_the_operator_pod_satisfies_the_restricted_level_with_a_read_only_root() -> None:
    level = pod()["securityContext"]
    assert level["runAsNonRoot"] is True
    assert level["runAsUser"] == 65532
    assert level["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container()["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_all_probes_use_the_health_path_on_the_operators_port() -> None:
    [port] = container()["ports"]
    assert environment()["ORCA_OPERATOR_LISTEN"] == f"[::]:{port['containerPort']}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container()[probe]["httpGet"] == {"path": "/health", "port": port["name"]}


def test_service_variables_are_disabled_in_the_operator_pod() -> None:
    assert the("Service")["metadata"]["name"] == "orca-operator"  # ORCA_OPERATOR_SERVICE_HOST would be unknown
    assert pod()["enableServiceLinks"] is False


def test_only_the_pod_asks_for_the_token() -> None:
    assert pod()["automountServiceAccountToken"] is True
    assert the("ServiceAccount")["automountServiceAccountToken"] is False


def test_the_whole_cluster_is_served_unless_namespaces_are_named() -> None:
    assert "ORCA_OPERATOR_NAMESPACES" not in environment()
    assert environment({"namespaces": ["a", "b"]})["ORCA_OPERATOR_NAMESPACES"] == "a,b"


def test_images_have_the_tag_of_the_release() -> None:
    assert container()["image"] == "orca-operator:0.1.0"
    found = {name: value for name, value in environment().items() if name.startswith("ORCA_OPERATOR_IMAGE_")}
    assert found == {
        f"ORCA_OPERATOR_IMAGE_{role.upper()}": f"orca-{role}:0.1.0"
        for role in ("gateway", "scheduler", "worker", "pool", "fetch")
    }


@pytest.mark.parametrize(
    ("images", "reference"),
    [
        ({"registry": "example.com:5000/orca"}, "example.com:5000/orca/orca-worker:0.1.0"),
        ({"tag": "7"}, "orca-worker:7"),
        ({"worker": "example.com:5000/worker"}, "example.com:5000/worker:0.1.0"),
        ({"registry": "example.com", "tag": "7", "worker": "other/worker:8"}, "other/worker:8"),
        ({"registry": "example.com", "worker": "other/worker@sha256:12ab"}, "other/worker@sha256:12ab"),
    ],
)
def test_an_image_takes_registry_and_tag_unless_it_has_its_own(images: dict[str, str], reference: str) -> None:
    assert environment({"images": images})["ORCA_OPERATOR_IMAGE_WORKER"] == reference


def test_the_pull_policy_of_the_operators_image_can_be_set() -> None:
    values = {"images": {"pullPolicy": "Always", "pullSecrets": ["one", "two"]}}
    assert container(values)["imagePullPolicy"] == "Always"
    assert pod(values)["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]


@pytest.mark.parametrize(
    ("values", "variable", "value"),
    [
        ({"operator": {"logLevel": "debug"}}, "ORCA_OPERATOR_LOG_LEVEL", "debug"),
        ({"operator": {"resyncSeconds": 3600}}, "ORCA_OPERATOR_RESYNC_SECONDS", "3600"),
        ({"networkPolicies": {"deployments": True}}, "ORCA_OPERATOR_NETWORK_POLICIES", "true"),
        ({"networkPolicies": {"deployments": True}}, "ORCA_OPERATOR_DNS_PORTS", "53"),
        ({"networkPolicies": {"deployments": True, "dnsPorts": [53, 5353]}}, "ORCA_OPERATOR_DNS_PORTS", "53,5353"),
        ({"operator": {"extraEnv": [{"name": "ORCA_OPERATOR_WORKERS", "value": "8"}]}}, "ORCA_OPERATOR_WORKERS", "8"),
    ],
)
def test_settings_reach_the_operator_as_variables(values: dict[str, Any], variable: str, value: str) -> None:
    assert environment(values)[variable] == value


def test_the_operator_understands_its_variables() -> None:
    values = {"namespaces": ["a", "b"], "operator": {"resyncSeconds": 60, "logLevel": "debug"}, "images": {"tag": "7"}}
    settings = parse_settings([], environment(values | {"networkPolicies": {"deployments": True}}))
    assert settings.namespaces == ("a", "b")
    assert (settings.resync_seconds, settings.log_level) == (60, "debug")
    assert settings.release.worker == "orca-worker:7"
    assert settings.network_policies
    assert settings.release.dns_ports == (53,)


def test_the_operator_uses_a_lease_of_the_release_with_its_pod_as_holder() -> None:
    terms = parse_settings([], environment()).lease_terms
    assert terms is not None
    assert (terms.namespace, terms.name, terms.identity) == ("system", "orca-operator", "orca-operator-1a-2b")


def test_the_name_of_the_operator_is_that_of_its_deployment() -> None:
    metadata = the("Deployment")["metadata"]
    assert parse_settings([], environment()).identity == f"{metadata['namespace']}/{metadata['name']}"


def test_resources_can_be_replaced() -> None:
    assert container({"operator": {"resources": {"requests": {"cpu": 2}}}})["resources"]["requests"]["cpu"] == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priorityClassName", "system-cluster-critical"),
        ("nodeSelector", {"pool": "system"}),
    ],
)
def test_node_selection_of_the_operator_can_be_set(name: str, value: object) -> None:
    assert name not in pod()
    assert pod({"operator": {name: value}})[name] == value


AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}}
SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}


def test_affinity_and_spread_of_the_operator_can_be_set() -> None:
    assert not {"affinity", "topologySpreadConstraints"} & pod().keys()
    mine = {"labelSelector": {"matchLabels": {"a": "b"}}}
    found = pod({"operator": {"affinity": AFFINITY, "topologySpreadConstraints": [SPREAD, SPREAD | mine]}})
    assert found["affinity"] == AFFINITY
    selector = the("Service")["spec"]["selector"]
    assert found["topologySpreadConstraints"] == [SPREAD | {"labelSelector": {"matchLabels": selector}}, SPREAD | mine]


def test_variables_and_volumes_of_the_operator_can_be_added() -> None:
    secret = {"name": "CA", "valueFrom": {"secretKeyRef": {"name": "ca", "key": "path"}}}
    volume = {"name": "ca", "configMap": {"name": "ca"}}
    mount = {"name": "ca", "mountPath": "/etc/ca", "readOnly": True}
    values = {"operator": {"extraEnv": [secret], "extraVolumes": [volume], "extraVolumeMounts": [mount]}}
    assert container(values)["env"] == [*container()["env"], secret]
    assert pod(values)["volumes"] == [*pod()["volumes"], volume]
    assert container(values)["volumeMounts"] == [*container()["volumeMounts"], mount]


def test_a_cluster_may_choose_the_user_of_the_operator() -> None:
    mine = {"runAsUser": None, "runAsGroup": None}
    given = pod({"operator": {"podSecurityContext": mine}})["securityContext"]
    assert given == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "securityContext" not in pod({"operator": {"podSecurityContext": None}})
    assert "securityContext" not in container({"operator": {"securityContext": None}})
    other = {"operator": {"podSecurityContext": {"runAsUser": 1000, "fsGroup": 2}}}
    assert pod(other)["securityContext"] == pod()["securityContext"] | {"runAsUser": 1000, "fsGroup": 2}


def test_the_number_of_kept_replica_sets_can_be_set() -> None:
    assert the("Deployment", {"operator": {"revisionHistoryLimit": 0}})["spec"]["revisionHistoryLimit"] == 0


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"extraEnv": [{"name": "ORCA_OPERATOR_LEASE", "value": "a"}]}, "the chart sets ORCA_OPERATOR_LEASE itself"),
        ({"extraEnv": [{"name": "ORCA_OPERATOR_IMAGE_POOL", "value": "a"}]}, "the chart sets ORCA_OPERATOR_IMAGE_POOL"),
        ({"extraVolumes": [{"name": "temporary", "emptyDir": {}}]}, "has a volume named temporary itself"),
        ({"extraVolumeMounts": [{"name": "a", "mountPath": "/tmp/"}]}, "mounts a volume of its own at /tmp"),
        ({"podLabels": {"app.kubernetes.io/name": "a"}}, "the chart sets the label app.kubernetes.io/name itself"),
    ],
)
def test_what_the_chart_sets_itself_is_refused_with_a_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        pod({"operator": values})


def test_every_variable_that_the_chart_sets_is_refused_in_extra_env() -> None:
    for name in environment({"namespaces": ["a"], "networkPolicies": {"deployments": True}}):
        with pytest.raises(Refused, match=f"the chart sets {name} itself"):
            pod({"operator": {"extraEnv": [{"name": name, "value": "a"}]}})


def test_the_operator_leaves_a_lost_node_soon_with_any_tolerations() -> None:
    more = {"key": "a", "operator": "Exists", "effect": "NoSchedule"}
    given, *own = pod({"operator": {"tolerations": [more]}})["tolerations"]
    assert given == more
    assert own == pod()["tolerations"]
    assert [(each["key"], each["tolerationSeconds"]) for each in own] == [
        ("node.kubernetes.io/not-ready", 10),
        ("node.kubernetes.io/unreachable", 10),
    ]


def test_labels_and_annotations_of_the_pod_are_added() -> None:
    values = {"operator": {"podLabels": {"team": "serving"}, "podAnnotations": {"note": "yes"}}}
    metadata = the("Deployment", values)["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "serving"
    assert metadata["annotations"] == {"note": "yes"}


@pytest.mark.parametrize(
    ("account", "name"),
    [({}, "orca-operator"), ({"name": "mine"}, "mine"), ({"create": False}, "default")],
)
def test_the_pod_and_its_rights_have_the_same_account(account: dict[str, Any], name: str) -> None:
    values = {"serviceAccount": account}
    assert pod(values)["serviceAccountName"] == name
    [subject] = the("ClusterRoleBinding", values)["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": name, "namespace": "system"}


def test_the_account_can_have_annotations() -> None:
    account = the("ServiceAccount", {"serviceAccount": {"annotations": {"role": "reader"}}})
    assert account["metadata"]["annotations"] == {"role": "reader"}


def test_a_class_name_that_yaml_reads_as_another_type_stays_a_text() -> None:
    assert pod({"operator": {"priorityClassName": "5"}})["priorityClassName"] == "5"


def test_a_registry_may_be_an_ipv6_address() -> None:
    assert container({"images": {"registry": "[::1]:5000", "tag": "dev"}})["image"] == "[::1]:5000/orca-operator:dev"
