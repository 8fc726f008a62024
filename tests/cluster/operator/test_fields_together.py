"""Contradicting fields and forbidden changes of a resource are refused on write."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from orca.operator.domain.resource import BadSpec, Json
from orca.scheduler.policy.cycle import CycleControls
from support.operator.api_server import ApiServer
from support.operator.deployments import deployment
from support.operator.dry_run import DryRun, dry_run
from support.operator.field_examples import DEFAULT
from support.operator.shop import Shop

NAMESPACE = "together"
DEVICE = {"a.example/dongle": "2"}


@pytest.fixture(scope="module")
def api(server: ApiServer) -> Iterator[DryRun]:
    client.CoreV1Api(server.api()).create_namespace({"metadata": {"name": NAMESPACE}})
    with dry_run(server, NAMESPACE) as asked:
        yield asked


def with_resources(**resources: Json) -> Json:
    return {"worker": {"resources": resources}}


def serving(**service: Any) -> Json:
    return {"gateway": {"service": service}}


def tolerating(**toleration: Any) -> Json:
    return {"gateway": {"tolerations": [toleration]}}


def alternating(**changes: Any) -> Json:
    """Return a spec with the policy rra. Args: changes: controls, or fields of the scheduler."""
    of_scheduler = {key: changes.pop(key) for key in ("policy", "maxBatchTokens", "maxBatchSize") if key in changes}
    return {"scheduler": {"policy": "rra", "rra": {"encodeBatch": 4, "decodeSteps": 8, **changes}, **of_scheduler}}


def ordering(order: str | None, **deadline: Any) -> Json:
    """Return a spec with rules of the order Deadline. Args: order: None leaves it out."""
    return {"scheduler": {"deadline": deadline, **({} if order is None else {"order": order})}}


def with_goal(*, slo: Json, **spec: Any) -> Json:
    """Return a spec with a goal. Args: slo: fields of it beside those that it needs."""
    return {"slo": {"latencyMs": 8000, "devices": 4, **slo}, **spec}


def dividing(*layers: int, stages: int) -> Json:
    return {"parallelism": {"stages": stages, "stageLayers": list(layers)}}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"model": {"uri": "file:///m", "revision": "main"}}, "revision needs an hf:// uri"),
        ({"model": {"uri": "pvc://m", "endpoint": "https://a.example"}}, "endpoint needs an hf:// or s3:// uri"),
        (
            {"model": {"uri": "file:///m", "quantization": "int8"}, "worker": {"device": "cuda"}},
            "quantization needs the device cpu",
        ),
        ({"worker": {"rdmaResource": {"name": "rdma/hca"}}}, "rdmaResource needs the device cuda"),
        (
            {"worker": {"device": "cuda", "resources": {"limits": {"nvidia.com/gpu": 1}}}},
            "do not set the acceleratorResource, by default nvidia.com/gpu, in limits; parallelism.tensor sets it",
        ),
        (
            {"worker": {"device": "cuda", "acceleratorResource": "a/b", "resources": {"limits": {"a/b": 1}}}},
            "do not set the acceleratorResource",
        ),
        (
            {"worker": {"device": "cuda", "acceleratorResource": "a/b", "rdmaResource": {"name": "a/b"}}},
            "rdmaResource must name RDMA devices, not accelerators",
        ),
        (
            {"worker": {"device": "cuda", "rdmaResource": {"name": "a/b"}, "resources": {"limits": {"a/b": 1}}}},
            "do not set the RDMA devices in limits; rdmaResource.count sets them",
        ),
        (
            {
                "worker": {"device": "cuda", "acceleratorResource": "nvidia.com/mig-1g.10gb"},
                "parallelism": {"tensor": 2},
            },
            "parallelism.tensor must be 1, since a process sees one slice only",
        ),
        (with_resources(requests={"cpu": "1001m"}, limits={"cpu": 1}), "a request must not exceed its limit"),
        (with_resources(requests=DEVICE), "a device needs a limit"),
        (with_resources(requests={"a.example/dongle": 1}, limits=DEVICE), "a device needs a limit"),
        (with_resources(limits={"a.example/dongle": "500m"}), "the number of devices must be whole"),
        (tolerating(), "a toleration without a key needs the operator Exists"),
        (tolerating(key="a", operator="Exists", value="b"), "the operator Exists takes no value"),
        (tolerating(key="a", effect="NoSchedule", tolerationSeconds=1), "tolerationSeconds needs the effect NoExecute"),
        ({"scheduler": {"maxBatchTokens": 16}}, "maxBatchTokens must be 0 or greater than maxBatchSize"),
        ({"scheduler": {"maxBatchTokens": 32, "policy": "request_level"}}, "maxBatchTokens needs the policy iteration"),
        ({"scheduler": {"policy": "rra"}}, "the policy rra needs rra.encodeBatch and rra.decodeSteps"),
        ({"scheduler": {"policy": "rra", "rra": {"decodeSteps": 2}}}, "spec.scheduler.rra.encodeBatch: Required value"),
        ({"scheduler": {"policy": "rra", "rra": {"encodeBatch": 2}}}, "spec.scheduler.rra.decodeSteps: Required value"),
        (
            alternating(policy="iteration"),
            "rra (encodeBatch, decodeSteps, decodeBatch, encodeTokens, thresholdPercent)",
        ),
        (alternating(policy="request_level"), "needs the policy rra"),
        (alternating(maxBatchTokens=64), "maxBatchTokens needs the policy iteration"),
        (alternating(encodeBatch=0), "spec.scheduler.rra.encodeBatch in body should be greater than or equal to 1"),
        (alternating(decodeSteps=0), "spec.scheduler.rra.decodeSteps in body should be greater than or equal to 1"),
        (alternating(decodeBatch=0), "spec.scheduler.rra.decodeBatch in body should be greater than or equal to 1"),
        (alternating(encodeTokens=0), "spec.scheduler.rra.encodeTokens in body should be greater than or equal to 1"),
        (alternating(thresholdPercent=-1), "thresholdPercent in body should be greater than or equal to 0"),
        (alternating(thresholdPercent=101), "thresholdPercent in body should be less than or equal to 100"),
        (alternating(encodeBatch=17), "scheduler.rra.encodeBatch must be at most parallelism.stages times"),
        (alternating(decodeBatch=17), "scheduler.rra.decodeBatch must be at most parallelism.stages times"),
        (
            alternating(encodeBatch=9, decodeBatch=8),
            "encodeBatch must be at most decodeBatch and thresholdPercent of it",
        ),
        (ordering(None), "deadline (utility, etaPercent, patienceSeconds, drop) needs the order Deadline"),
        (ordering("Arrival", drop="Never"), "add order: Deadline, or leave deadline out"),
        (ordering("Earliest"), 'spec.scheduler.order: Unsupported value: "Earliest": supported values: "Arrival"'),
        (ordering("Deadline", utility="Most"), 'spec.scheduler.deadline.utility: Unsupported value: "Most"'),
        (ordering("Deadline", drop="Always"), 'spec.scheduler.deadline.drop: Unsupported value: "Always"'),
        (ordering("Deadline", etaPercent=0), "deadline.etaPercent in body should be greater than or equal to 1"),
        (ordering("Deadline", etaPercent=100), "deadline.etaPercent in body should be less than or equal to 99"),
        (ordering("Deadline", patienceSeconds=0), "deadline.patienceSeconds in body should be greater than or equal"),
        ({"slo": {"devices": 4}}, "spec.slo.latencyMs: Required value"),
        ({"slo": {"latencyMs": 8000}}, "spec.slo.devices: Required value"),
        (with_goal(slo={}, scheduler={"policy": "request_level"}), "slo needs the policy iteration or rra"),
        (with_goal(slo={}, scheduler={"maxBatchTokens": 0}), "with slo the plan decides scheduler.maxBatchTokens"),
        (with_goal(slo={}, **alternating()), "with slo the plan decides scheduler.maxBatchTokens"),
        (with_goal(slo={}, parallelism={"stages": 5}), "which are more than slo.devices"),
        (with_goal(slo={}, parallelism={"stages": 3, "tensor": 2}), "which are more than slo.devices"),
        (with_goal(slo={}, **dividing(12, 12, stages=3)), "stageLayers must have as many numbers as stages says"),
        (with_goal(slo={"kind": "requests"}), "the kind requests needs workload.requestsPerMinute"),
        (
            with_goal(slo={}, worker={"device": "cuda", "acceleratorResource": "nvidia.com/mig-1g.10gb"}),
            "slo.devices must be 1, since a process sees one slice only",
        ),
        (dividing(12, 12, stages=1), "stageLayers must have as many numbers as stages says"),
        (dividing(24, stages=2), "stageLayers must have as many numbers as stages says"),
        (dividing(24, 0, stages=2), "spec.parallelism.stageLayers[1] in body should be greater than or equal to 1"),
        ({"gateway": {"ingress": {}, "httpRoute": {"parentRefs": [{"name": "a"}]}}}, "give ingress or httpRoute"),
        (serving(loadBalancerClass="a"), "loadBalancerClass needs the type LoadBalancer"),
        (serving(externalTrafficPolicy="Local"), "externalTrafficPolicy needs the type NodePort or LoadBalancer"),
        (serving(ipFamilies=["IPv4", "IPv6"], ipFamilyPolicy="SingleStack"), "two need PreferDualStack or"),
        (serving(ipFamilies=["IPv4"]), "one of ipFamilies needs the ipFamilyPolicy SingleStack"),
        (serving(ipFamilies=["IPv4", "IPv4"]), "ipFamilies must name each family once"),
        (serving(labels={"app.kubernetes.io/instance": "a"}), "Argo CD would take them for its own"),
        ({"serviceAccount": {"name": "a", "annotations": {"a": "b"}}}, "give name or annotations, not both"),
        ({"gateway": {"apiKeysSecret": {"name": "a"}, "openToAll": True}}, "give apiKeysSecret or openToAll"),
        ({"pool": {"managed": {}, "external": {"urlSecret": {"name": "a"}}}}, "give managed or external"),
        ({"pool": {"managed": {"storageGiB": 4}}}, "storageGiB must be at least three times memoryMiB"),
        (
            {"pool": {"resources": {"limits": {"memory": "256Mi"}}}},
            "resources.limits.memory must be at least five quarters of managed.memoryMiB and 64 MiB",
        ),
        (
            {"pool": {"managed": {"memoryMiB": 256}, "resources": {"limits": {"memory": 402653183}}}},
            "resources.limits.memory must be at least five quarters",
        ),
        ({"rollout": {"maxSurge": 0}}, "maxSurge and maxUnavailable cannot both be 0"),
        ({"gateway": {"tolerations": [{"operator": "Exists"}] * 33}}, "must have at most 32 items"),
        ({"gateway": {"httpRoute": {"parentRefs": [{"name": "a"}] * 9}}}, "must have at most 8 items"),
        ({"gateway": {"httpRoute": {"parentRefs": []}}}, "should have at least 1 items"),
        ({"pool": {"podPatchRemove": ["/metadata/labels"]}}, "the operator needs labels, annotations, containers"),
        ({"fetch": {"podPatchRemove": ["/spec/containers/fetch/args"]}}, "the operator needs its container"),
        ({"pool": {"podPatchRemove": ["/spec/containers/redis/args/--aclfile"]}}, "the operator needs its container"),
        ({"worker": {"podPatchRemove": ["/metadata/labels/orca-serving.io~1group"]}}, "are the operator's"),
    ],
)
def test_contradicting_fields_are_refused_with_a_reason(api: DryRun, spec: Json, reason: str) -> None:
    said = api.create({**DEFAULT, **spec})
    assert said.status == 422
    assert reason in said.body["message"]


@pytest.mark.parametrize(
    "pool",
    [
        {"managed": {"memoryMiB": 256}, "resources": {"limits": {"memory": 402653184}}},
        {"managed": {"memoryMiB": 256}, "resources": {"limits": {"memory": "0.403e9"}}},
        {"external": {"urlSecret": {"name": "a"}}, "resources": {"limits": {"memory": "1Mi"}}},
    ],
)
def test_a_limit_with_room_for_redis_and_one_beside_an_external_pool_are_accepted(api: DryRun, pool: Json) -> None:
    assert api.create({**DEFAULT, "pool": pool}).status == 201


@pytest.mark.parametrize("rules", [{}, {"etaPercent": 99, "patienceSeconds": 1}, {"drop": "Never"}])
def test_rules_of_an_order_are_accepted_beside_it(api: DryRun, rules: Json) -> None:
    said = api.create({**DEFAULT, **ordering("Deadline", **rules)})
    assert said.status == 201
    stated = {"utility": "Equal", "etaPercent": 75, "patienceSeconds": 30, "drop": "Certain"}
    assert said.body["spec"]["scheduler"]["deadline"] == stated | rules


@pytest.mark.parametrize("spec", [{}, {"scheduler": {"order": "Deadline"}}])
def test_no_rules_appear_that_nobody_gave(api: DryRun, spec: Json) -> None:
    said = api.create({**DEFAULT, **spec})
    assert said.status == 201
    assert "deadline" not in said.body["spec"]["scheduler"]


@pytest.mark.parametrize("policy", ["iteration", "request_level", "rra"])
def test_whole_prompts_may_be_asked_for_under_any_policy(api: DryRun, policy: str) -> None:
    controls = {"rra": {"encodeBatch": 4, "decodeSteps": 8}} if policy == "rra" else {}
    spec = {"scheduler": {"maxBatchTokens": 0, "policy": policy, **controls}}
    assert api.create({**DEFAULT, **spec}).status == 201


def test_controls_of_rra_are_accepted_exactly_if_a_scheduler_accepts_them(api: DryRun) -> None:
    accepted = 0
    sizes = itertools.product((1, 3), (2, 5), (1, 2, 4, 6, 7, 15), (None, 1, 2, 4, 6, 15), (None, 0, 12, 100))
    for stages, size, encode, decode, threshold in sizes:
        optional = {"decode_batch": decode, "threshold_percent": threshold}
        chosen = {name: value for name, value in optional.items() if value is not None}
        controls = CycleControls(encode_batch=encode, decode_steps=1, **chosen)
        named = {"decodeBatch": decode, "thresholdPercent": threshold}
        spec = alternating(encodeBatch=encode, maxBatchSize=size, **{k: v for k, v in named.items() if v is not None})
        said = api.create({**DEFAULT, **spec, "parallelism": {"stages": stages}})
        is_sound = controls.broken_rule(stages=stages, max_batch_size=size) is None
        assert said.status == (201 if is_sound else 422), f"{spec}: {said}"
        accepted += is_sound
    assert accepted > 50


@pytest.mark.parametrize("name", ["a" * 29, "1a", "a.b"])
def test_a_name_that_is_too_long_for_its_children_is_refused(api: DryRun, name: str) -> None:
    said = api.create(DEFAULT, name)
    assert said.status == 422
    assert "metadata.name" in said.body["message"]


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({"managed": {"storageGiB": 16}}, {"managed": {"storageGiB": 8}}, "storageGiB can only grow"),
        ({"managed": {"storageGiB": 16}}, {}, "storageGiB can only grow"),
        ({}, {"managed": {"storageGiB": 7}}, "storageGiB can only grow"),
        ({}, {"managed": {"storageClassName": "a"}}, "storageClassName is fixed"),
        ({"managed": {"storageClassName": "a"}}, {}, "storageClassName is fixed"),
        ({"managed": {}}, {"managed": {"storageClassName": "a"}}, "storageClassName is fixed"),
        ({"managed": {"storageClassName": "a"}}, {"managed": {"storageClassName": "b"}}, "storageClassName is fixed"),
        (
            {"managed": {}},
            {"external": {"urlSecret": {"name": "a"}}},
            "pool cannot change between managed and external",
        ),
        (
            {"external": {"urlSecret": {"name": "a"}}},
            {"managed": {}},
            "pool cannot change between managed and external",
        ),
    ],
)
@pytest.mark.usefixtures("api")
def test_changes_of_immutable_fields_are_refused_with_a_reason(
    server: ApiServer, before: Json, after: Json, reason: str
) -> None:
    shop = Shop(server, NAMESPACE)
    shop.create(pool=before)
    try:
        with pytest.raises(client.ApiException) as refused:
            shop.edit(pool={**dict.fromkeys(before), **after})
        assert refused.value.status == 422
        assert reason in refused.value.body
    finally:
        shop.delete()


ONE_FAMILY = {"ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"}
BALANCED = {"type": "LoadBalancer", "loadBalancerClass": "a"}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (BALANCED, {"loadBalancerClass": "b"}, "a load balancer keeps its loadBalancerClass"),
        (BALANCED, {"loadBalancerClass": None}, "a load balancer keeps its loadBalancerClass"),
        (BALANCED, {"type": "ClusterIP", "loadBalancerClass": None}, None),
        (ONE_FAMILY, {"ipFamilies": ["IPv6"]}, "the first of ipFamilies is fixed"),
        (ONE_FAMILY, {"ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack"}, None),
        (ONE_FAMILY, {"ipFamilies": None}, None),
    ],
)
@pytest.mark.usefixtures("api")
def test_a_service_changes_only_what_its_cluster_lets_it_change(
    server: ApiServer, before: Json, after: Json, reason: str | None
) -> None:
    """Args: reason: None if the change is accepted."""
    shop = Shop(server, NAMESPACE)
    shop.create(pool={}, gateway={"service": before})
    try:
        if reason is None:
            shop.edit(gateway={"service": after})
            return
        with pytest.raises(client.ApiException) as refused:
            shop.edit(gateway={"service": after})
        assert refused.value.status == 422
        assert reason in refused.value.body
    finally:
        shop.delete()


@pytest.mark.usefixtures("api")
def test_a_volume_of_the_default_size_may_be_stated_and_grow(server: ApiServer) -> None:
    shop = Shop(server, NAMESPACE)
    shop.create(pool={})
    try:
        shop.edit(pool={"managed": {"storageGiB": 8}})
        shop.edit(pool={"managed": None})
        shop.edit(pool={"managed": {"storageGiB": 9}})
    finally:
        shop.delete()


@pytest.mark.parametrize(
    "parents",
    [
        [{"name": "a"}, {"name": "a"}],
        [{"name": "a"}, {"name": "a", "sectionName": "s"}],
        [{"name": "a", "sectionName": "s"}, {"name": "a", "sectionName": "s"}],
    ],
)
def test_a_gateway_that_is_named_twice_is_refused(parents: list[Json]) -> None:
    with pytest.raises(BadSpec, match="a appears twice"):
        deployment(gateway={"httpRoute": {"parentRefs": parents}})


@pytest.mark.parametrize(
    "parents",
    [
        [{"name": "a"}, {"name": "b"}],
        [{"name": "a"}, {"name": "a", "namespace": "other"}],
        [{"name": "a", "sectionName": "s"}, {"name": "a", "sectionName": "t"}],
    ],
)
def test_gateways_with_different_names_are_accepted(parents: list[Json]) -> None:
    found = deployment(gateway={"httpRoute": {"parentRefs": parents}}).spec.gateway.http_route
    assert found is not None
    assert list(found.parent_refs) == parents


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ({"kind": "Pod"}, "kind is not a field of a pod template"),
        ({"spec": "word"}, "podPatch.spec is not an object"),
        (
            {"metadata": {"labels": {"orca-serving.io/revision": "x"}}},
            "only the operator sets orca-serving.io/revision",
        ),
        (
            {"metadata": {"annotations": {"orca-serving.io/models": None}}},
            "only the operator sets orca-serving.io/models",
        ),
        ({"spec": {"terminationGracePeriodSeconds": "9"}}, "is not a whole number"),
        ({"spec": {"terminationGracePeriodSeconds": None}}, "null means Kubernetes' default of 30 s"),
        ({"spec": {"terminationGracePeriodSeconds": 304}}, "is less than the 305 s .* open answers would be cut off"),
    ],
)
def test_a_patch_that_makes_no_valid_pod_is_refused_with_a_reason(patch: Json, reason: str) -> None:
    with pytest.raises(BadSpec, match=reason):
        deployment(gateway={"podPatch": patch})


def test_a_gateway_may_get_exactly_the_time_that_its_shutdown_needs() -> None:
    patch = {"spec": {"terminationGracePeriodSeconds": 305}}
    assert deployment(gateway={"podPatch": patch, "drainSeconds": 300}).spec.gateway.pod_patch == patch
