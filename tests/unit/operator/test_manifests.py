"""Manifests: rules for all of them, and the effect of single fields of the spec."""

import json
from typing import Any

import pytest

from orca.operator.domain.resource import Json
from orca.operator.plan.slots_change import asked_slots
from orca.operator.render import group
from orca.scheduler.settings import parse_settings
from support.operator.clusters import POOL_URL, FakeCluster
from support.operator.deployments import deployment

ON_HUB = {"uri": "hf://org/model"}


def manifests(**spec: Any) -> dict[tuple[str, str], Json]:
    cluster = FakeCluster(deployment(**spec))
    cluster.settle()
    return {key: value for key, value in cluster.objects.items() if key[0] != "Pod"}


def pods(**spec: Any) -> dict[str, Json]:
    """Pod specs by role."""
    return {
        each["metadata"]["labels"]["orca-serving.io/role"]: each["spec"]["template"]["spec"]
        for (kind, _), each in manifests(**spec).items()
        if kind in ("StatefulSet", "Deployment", "Job")
    }


def flags(pod: Json) -> dict[str, str]:
    words = pod["containers"][0]["args"]
    start = next(index for index, word in enumerate(words) if word.startswith("--"))
    return {words[i].removeprefix("--"): words[i + 1] for i in range(start, len(words), 2)}


@pytest.mark.parametrize("role", ["gateway", "scheduler", "stage", "pool", "fetch"])
def test_every_pod_is_fit_for_the_restricted_level(role: str) -> None:
    pod = pods(model=ON_HUB)[role]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


@pytest.mark.parametrize("role", ["gateway", "scheduler", "stage", "pool", "fetch"])
def test_no_pod_can_call_the_api_server_or_gets_service_variables(role: str) -> None:
    pod = pods(model=ON_HUB)[role]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize("role", ["gateway", "scheduler", "stage", "pool", "fetch"])
def test_all_pods_have_the_service_account_of_their_deployment_without_a_token(role: str) -> None:
    account = manifests()["ServiceAccount", "shop"]
    assert account["automountServiceAccountToken"] is False
    assert account["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert pods(model=ON_HUB)[role]["serviceAccountName"] == "shop"


@pytest.mark.parametrize("role", ["gateway", "scheduler", "stage", "pool", "fetch"])
def test_pods_may_have_an_account_of_the_users_and_still_get_no_token(role: str) -> None:
    pod = pods(model=ON_HUB, serviceAccount={"name": "mine"})[role]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("mine", False)


def test_the_operators_account_may_carry_an_identity_of_a_cloud_and_no_pod_changes_for_it() -> None:
    annotations = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}
    found = manifests(model=ON_HUB, serviceAccount={"annotations": annotations})
    assert found["ServiceAccount", "shop"]["metadata"]["annotations"] == annotations
    assert found["ServiceAccount", "shop"]["automountServiceAccountToken"] is False
    assert pods(model=ON_HUB, serviceAccount={"annotations": annotations}) == pods(model=ON_HUB)
    assert ("ServiceAccount", "shop") in manifests(serviceAccount={"name": "mine"})


@pytest.mark.parametrize("role", ["gateway", "scheduler", "stage", "pool"])
def test_every_container_is_probed(role: str) -> None:
    [container] = pods()[role]["containers"]
    assert {"readinessProbe", "livenessProbe", "startupProbe"} <= container.keys()


def test_a_gateway_is_probed_on_the_internal_port_that_clients_cannot_fill() -> None:
    gateway = pods(gateway={"limits": {"connections": 1}})["gateway"]
    [container] = gateway["containers"]
    [port] = [each["containerPort"] for each in container["ports"] if each["name"] == "metrics"]
    assert flags(gateway)["metrics-port"] == str(port)
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "metrics"}


def test_a_rolling_update_reaches_pods_that_cannot_start() -> None:
    """A StatefulSet with the default policy waits for such a pod before it replaces it, so for ever."""
    found = [each for (kind, _), each in manifests(pool={}).items() if kind == "StatefulSet"]
    assert [each["spec"].get("podManagementPolicy") for each in found] == ["Parallel"] * 3


def test_child_names_fit_for_the_longest_resource_name() -> None:
    for (kind, name), each in manifests(name="n" * 28, replicas=3, model=ON_HUB).items():
        # A StatefulSet labels its pods with its name and 11 characters more.
        assert len(name) <= (52 if kind == "StatefulSet" else 63)
        assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())


@pytest.mark.parametrize(
    ("device", "scheduler", "tokens"),
    [
        ("cpu", {}, 256),
        ("cpu", {"maxBatchSize": 256}, 512),
        ("cpu", {"maxBatchTokens": 64}, 64),
        ("cpu", {"maxBatchTokens": 0}, None),
        ("cpu", {"policy": "request_level"}, None),
        ("cuda", {}, None),
        ("cuda", {"maxBatchTokens": 4096}, 4096),
    ],
)
def test_prompts_run_in_chunks_as_asked_and_by_default_only_on_cpus(
    device: str, scheduler: Json, tokens: int | None
) -> None:
    made = group.schedule(deployment(worker={"device": device}, scheduler=scheduler))
    assert json.loads(made["data"]["bounds.json"])["max_batch_tokens"] == tokens


def test_a_scheduler_gets_the_names_of_all_its_stages() -> None:
    pod = pods(parallelism={"stages": 2})["scheduler"]
    first, second = flags(pod)["stages"].split(",")
    assert first.endswith(".ns.svc:7000")
    assert second == first.replace("-0.", "-1.", 1)


def test_no_variable_changes_the_block_size_in_which_slots_are_promised() -> None:
    variables = {"ORCA_SCHEDULER_BLOCK_TOKENS": "32", "ORCA_SCHEDULER_POOL": "redis://a.example:6379/0"}
    [container] = pods(scheduler={"kvSlots": 1008})["scheduler"]["containers"]
    settings = parse_settings(container["args"][1:], variables)
    asked = asked_slots(deployment(scheduler={"kvSlots": 1008}))
    assert settings.slots is not None
    assert settings.slots // settings.block_tokens * settings.block_tokens == asked == 1008


def test_a_stage_reads_its_index_from_its_own_pod() -> None:
    [container] = pods()["stage"]["containers"]
    variables = {each["name"]: each.get("valueFrom") for each in container["env"]}
    assert variables["ORCA_WORKER_STAGE"]["fieldRef"]["fieldPath"].endswith("['apps.kubernetes.io/pod-index']")
    assert variables["ORCA_WORKER_DATA_HOST"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_stages_get_their_numbers_of_layers_if_the_spec_has_them() -> None:
    stage = pods(parallelism={"stages": 3, "stageLayers": [10, 6, 8]})["stage"]
    assert flags(stage)["layers"] == "10,6,8"
    assert "layers" not in flags(pods(parallelism={"stages": 3})["stage"])


def test_cuda_requests_one_gpu_per_rank() -> None:
    stage = pods(worker={"device": "cuda"}, parallelism={"tensor": 2})["stage"]
    assert stage["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert flags(stage)["device"] == "cuda"


def test_accelerators_are_asked_for_by_the_name_of_their_device_plugin() -> None:
    worker = {"device": "cuda", "acceleratorResource": "amd.com/gpu", "resources": {"limits": {"memory": "1Gi"}}}
    stage = pods(worker=worker, parallelism={"tensor": 2})["stage"]
    assert stage["containers"][0]["resources"]["limits"] == {"memory": "1Gi", "amd.com/gpu": "2"}
    on_cpu = pods(worker={"acceleratorResource": "amd.com/gpu"})["stage"]
    assert "limits" not in on_cpu["containers"][0]["resources"]


def test_shared_memory_has_the_requested_size() -> None:
    volumes = pods(worker={"sharedMemoryMiB": 2048})["stage"]["volumes"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2048Mi"}} in volumes


def test_a_gateway_has_time_for_its_streams_and_leaves_the_service_first() -> None:
    gateway = pods(gateway={"drainSeconds": 60})["gateway"]
    assert gateway["terminationGracePeriodSeconds"] > 60
    assert gateway["containers"][0]["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
    assert flags(gateway)["drain-seconds"] == "60"


def test_a_gateway_allows_the_origins_of_web_pages_that_are_asked_for() -> None:
    allowed = pods(gateway={"corsOrigins": ["https://chat.example.com", "http://localhost:5173"]})["gateway"]
    assert flags(allowed)["cors-origins"] == "https://chat.example.com,http://localhost:5173"
    assert "cors-origins" not in flags(pods()["gateway"])


def test_metrics_have_the_names_that_are_asked_for_in_gateways_and_schedulers() -> None:
    asked = pods(metricNames=["orca", "vllm"])
    assert [flags(asked[role])["metric-names"] for role in ("gateway", "scheduler")] == ["orca,vllm"] * 2
    assert flags(asked["scheduler"])["name"] == flags(asked["gateway"])["name"]
    # An upgrade of the operator replaces no pod of a deployment that has the default.
    for role in ("gateway", "scheduler"):
        assert "metric-names" not in flags(pods()[role])
    assert "name" not in flags(pods()["scheduler"])


def test_a_node_with_a_single_gateway_can_be_drained_even_if_it_is_not_ready() -> None:
    budget = manifests()["PodDisruptionBudget", "shop-gateway"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_api_keys_are_user_provided_or_generated_or_absent() -> None:
    def keys(**gateway: Any) -> tuple[str | None, str | None]:
        pod = pods(gateway=gateway)["gateway"]
        named = [each["secret"]["secretName"] for each in pod["volumes"] if each["name"] == "api-keys"]
        return next(iter(named), None), flags(pod).get("open-to-network")

    assert keys() == ("shop-api-key", None)
    assert keys(apiKeysSecret={"name": "mine"}) == ("mine", None)
    assert keys(openToAll=True) == (None, "true")


@pytest.mark.parametrize(
    ("timeouts", "rendered"),
    [
        (None, {"request": "0s"}),
        ({}, None),
        ({"requestSeconds": 3600}, {"request": "3600s"}),
        ({"backendRequestSeconds": 0}, {"backendRequest": "0s"}),
        ({"requestSeconds": 86400, "backendRequestSeconds": 60}, {"request": "86400s", "backendRequest": "60s"}),
    ],
)
def test_the_timeouts_of_a_route_are_a_choice_and_can_be_left_out(timeouts: Json | None, rendered: Json | None) -> None:
    given = {} if timeouts is None else {"timeouts": timeouts}
    route = manifests(gateway={"httpRoute": {"parentRefs": [{"name": "edge"}], **given}})["HTTPRoute", "shop"]
    assert [each.get("timeouts") for each in route["spec"]["rules"]] == [rendered]


def service(**fields: Any) -> Json:
    return manifests(gateway={"service": fields})["Service", "shop"]


def test_the_service_of_the_api_has_the_type_and_the_fields_that_are_asked_for() -> None:
    fields = {"type": "LoadBalancer", "loadBalancerClass": "a.example/nlb", "externalTrafficPolicy": "Local"}
    families = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]}
    before, after = service()["spec"], service(**fields, **families)["spec"]
    assert after == before | fields | families


def test_the_type_of_the_service_is_always_written_so_that_a_type_before_leaves_nothing_behind() -> None:
    assert service()["spec"]["type"] == "ClusterIP"


def test_the_service_has_the_labels_and_annotations_that_are_asked_for_beside_the_operators() -> None:
    marks = service(labels={"team": "a"}, annotations={"a.example/internal": "true"})["metadata"]
    assert marks["labels"]["team"] == "a"
    assert marks["labels"]["orca-serving.io/role"] == "gateway"
    assert marks["annotations"] == {"a.example/internal": "true"}
    assert "annotations" not in service()["metadata"]


LISTENS = {"listen", "health-listen", "metrics-listen", "host"}
"""Flags that say where a part listens."""


@pytest.mark.parametrize("role", ["gateway", "scheduler", "stage", "fetch"])
def test_every_part_listens_at_all_addresses_of_its_pod(role: str) -> None:
    found = flags(pods(model=ON_HUB)[role])
    hosts = {
        value.rpartition(":")[0] if value.count(":") > 2 else value for name, value in found.items() if name in LISTENS
    }
    assert hosts == ({"::"} if role == "gateway" else {"[::]"})


def test_redis_binds_both_families_and_the_api_takes_every_family_of_its_cluster() -> None:
    [redis] = pods()["pool"]["containers"]
    words = redis["args"]
    assert words[words.index("--bind") + 1 :][:2] == ["*", "-::*"]
    assert manifests()["Service", "shop"]["spec"]["ipFamilyPolicy"] == "PreferDualStack"


def test_a_model_on_a_volume_claim_is_mounted_by_all_pods_that_read_it() -> None:
    for role in ("gateway", "scheduler", "stage"):
        pod = pods(model={"uri": "pvc://models/llama/7b"})[role]
        volume = {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
        assert volume in pod["volumes"]
        assert flags(pod)["model"] == "/models/llama/7b"


def test_an_external_pool_has_its_own_url_and_credentials() -> None:
    found = manifests(pool={"external": {"urlSecret": {"name": "redis", "key": "url"}, "minReplicas": 2}})
    assert ("StatefulSet", "shop-pool") not in found
    gateway = found["Deployment", "shop-gateway"]["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each for each in gateway["env"]}
    assert variables["ORCA_GATEWAY_POOL"]["value"] == "redis://redis.example:6379"
    assert variables["ORCA_POOL_REPLICAS"]["value"] == "2"


def login(*keys: str) -> tuple[Json, Json]:
    """Variables of a scheduler for a Secret with these keys beside the URL, and its volumes by name."""
    cluster = FakeCluster(deployment(pool={"external": {"urlSecret": {"name": "redis"}}}))
    cluster.pool_secret = {"data": {"url": POOL_URL, **dict.fromkeys(keys, "")}}
    cluster.settle()
    [scheduler] = cluster.names("StatefulSet", "scheduler")
    pod = cluster.objects["StatefulSet", scheduler]["spec"]["template"]["spec"]
    variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    return variables, {each["name"]: each for each in pod["volumes"]}


def test_an_external_pools_certificates_are_mounted_as_files() -> None:
    variables, volumes = login("user", "password", "ca.crt", "tls.crt", "tls.key")
    assert variables["ORCA_POOL_TLS_CA_FILE"] == "/etc/orca/pool/ca.crt"
    assert variables["ORCA_POOL_TLS_CERTIFICATE_FILE"] == "/etc/orca/pool/tls.crt"
    assert variables["ORCA_POOL_TLS_KEY_FILE"] == "/etc/orca/pool/tls.key"
    mounted = [each["key"] for each in volumes["pool-login"]["secret"]["items"]]
    assert mounted == ["password", "ca.crt", "tls.crt", "tls.key"]


def test_an_external_pool_may_need_no_credentials() -> None:
    variables, volumes = login()
    assert not {"ORCA_POOL_USER", "ORCA_POOL_PASSWORD_FILE"} & variables.keys()
    assert "pool-login" not in volumes


def test_an_ingress_does_not_buffer_streams_and_keeps_the_users_annotations() -> None:
    ours = "nginx.ingress.kubernetes.io/proxy-buffering"
    found = manifests(gateway={"ingress": {"host": "a.example", "annotations": {ours: "on", "mine": "1"}}})
    ingress = found["Ingress", "shop"]
    assert ingress["metadata"]["annotations"]["mine"] == "1"
    assert ingress["metadata"]["annotations"][ours] == "on"
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "3600"
    assert ingress["spec"]["rules"][0]["host"] == "a.example"


def test_an_http_route_refers_to_its_parents() -> None:
    found = manifests(gateway={"httpRoute": {"parentRefs": [{"name": "edge"}], "hostnames": ["a.example"]}})
    assert found["HTTPRoute", "shop"]["spec"]["parentRefs"] == [{"name": "edge"}]


def test_a_fetch_writes_to_the_volume_claim_that_all_others_mount_read_only() -> None:
    found = manifests(model=ON_HUB)
    [claim] = [name for kind, name in found if kind == "PersistentVolumeClaim" and name != "shop-pool"]
    by_role = pods(model=ON_HUB)
    for role, is_reader in [("fetch", False), ("gateway", True), ("scheduler", True), ("stage", True)]:
        [volume] = [each for each in by_role[role]["volumes"] if each["name"] == "model"]
        assert volume["persistentVolumeClaim"] == {"claimName": claim} | ({"readOnly": True} if is_reader else {})
    assert flags(by_role["fetch"])["into"] == flags(by_role["stage"])["model"]


def variables(**model: Any) -> Json:
    [container] = pods(model=model)["fetch"]["containers"]
    return {each["name"]: each.get("value") or each["valueFrom"]["secretKeyRef"]["key"] for each in container["env"]}


def test_a_fetch_gets_its_source_and_credentials() -> None:
    secret = {"name": "mine"}
    hub = variables(uri="hf://org/model", endpoint="https://hub.example", tokenSecret=secret)
    assert (hub["HF_ENDPOINT"], hub["HF_TOKEN"]) == ("https://hub.example", "token")
    store = variables(uri="s3://bucket/path", endpoint="https://s3.example", tokenSecret=secret)
    assert (store["AWS_ENDPOINT_URL"], store["AWS_SECRET_ACCESS_KEY"]) == ("https://s3.example", "secretAccessKey")
    assert "AWS_ACCESS_KEY_ID" not in variables(uri="s3://bucket/path")


def test_a_fetch_with_a_permanent_failure_is_not_retried_and_others_are() -> None:
    [job] = [each for (kind, _), each in manifests(model=ON_HUB).items() if kind == "Job"]
    [never, drained] = job["spec"]["podFailurePolicy"]["rules"]
    assert (never["action"], never["onExitCodes"]["values"]) == ("FailJob", [2])
    assert (drained["action"], job["spec"]["backoffLimit"] > 50) == ("Ignore", True)


def test_a_fetch_runs_on_nodes_where_stages_can_run() -> None:
    worker = {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    fetch = pods(model=ON_HUB, worker=worker)["fetch"]
    assert (fetch["nodeSelector"], fetch["tolerations"][:1]) == ({"gpu": "h100"}, worker["tolerations"])


def test_the_volume_claim_of_a_model_has_the_size_of_the_cache() -> None:
    cache = {"sizeGiB": 300, "storageClassName": "fast", "accessMode": "ReadWriteMany"}
    found = manifests(model={**ON_HUB, "cache": cache})
    [claim] = [each for (kind, name), each in found.items() if "model" in name and kind == "PersistentVolumeClaim"]
    resources = {"requests": {"storage": "300Gi"}}
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": resources, "storageClassName": "fast"}
