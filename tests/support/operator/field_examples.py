"""Examples for fields of an OrcaDeployment, with what the schema does not say: formats, and fields that they need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


def _letters(length: int) -> str:
    return "a" * length


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """`of_length` makes a value of so many characters; None where a length alone is not at fault."""

    valid: tuple[Any, ...]
    invalid: tuple[Any, ...] = ()
    of_length: Callable[[int], str] | None = _letters


DEFAULT: Json = {"model": {"uri": "file:///m"}}
_ON_HUB: Json = {"model": {"uri": "hf://org/model"}}


def _with(role: str, **fields: Any) -> Json:
    return DEFAULT | {role: fields}


def _with_rra(**controls: int) -> Json:
    """Return a spec with the policy rra, in which encodeBatch and decodeBatch may be as large as the schema allows."""
    scheduler = {"policy": "rra", "maxBatchSize": 65536, "rra": {"encodeBatch": 3, "decodeSteps": 3, **controls}}
    return _with("scheduler", **scheduler) | {"parallelism": {"stages": 64}}


BESIDE: Mapping[str, Json] = {
    "model.revision": _ON_HUB,
    "model.endpoint": _ON_HUB,
    "model.tokenSecret": _ON_HUB,
    "model.tokenSecret.key": {"model": {"uri": "hf://org/model", "tokenSecret": {"name": "mine"}}},
    "model.cache": _ON_HUB,
    "parallelism.stageLayers": _with("parallelism", stages=3),
    "worker.acceleratorResource": _with("worker", device="cuda"),
    "worker.rdmaResource": _with("worker", device="cuda"),
    "worker.rdmaResource.count": _with("worker", device="cuda", rdmaResource={"name": "rdma/hca"}),
    **{f"{role}.tolerations[]": _with(role, tolerations=[{"operator": "Exists"}]) for role in ("worker", "gateway")},
    **{
        f"{role}.tolerations[].{name}": _with(role, tolerations=[{"key": "gpu", "effect": "NoExecute"}])
        for role in ("worker", "gateway")
        for name in ("operator", "value", "tolerationSeconds")
    },
    "images.fetch": _ON_HUB,
    "fetch": _ON_HUB,
    "scheduler.maxBatchTokens": _with("scheduler", maxBatchSize=1),
    "scheduler.rra": _with_rra(),
    "scheduler.rra.decodeBatch": _with_rra(encodeBatch=1),
    "scheduler.deadline": _with("scheduler", order="Deadline"),
    "gateway.apiKeysSecret.key": _with("gateway", apiKeysSecret={"name": "mine"}),
    "gateway.service.loadBalancerClass": _with("gateway", service={"type": "LoadBalancer"}),
    "gateway.service.ipFamilies": _with("gateway", service={"ipFamilyPolicy": "SingleStack"}),
    "gateway.service.externalTrafficPolicy": _with("gateway", service={"type": "NodePort"}),
    "gateway.httpRoute": _with("gateway", httpRoute={"parentRefs": [{"name": "edge"}]}),
    "gateway.httpRoute.timeouts": _with("gateway", httpRoute={"parentRefs": [{"name": "edge"}], "timeouts": {}}),
    "gateway.ingress": _with("gateway", ingress={}),
    "gateway.ingress.tlsSecretName": _with("gateway", ingress={"host": "a.example"}),
    "pool.managed.storageGiB": _with("pool", managed={"memoryMiB": 128}),
    "pool.managed.memoryMiB": _with("pool", managed={"storageGiB": 65536}),
    "pool.external": _with("pool", external={"urlSecret": {"name": "redis"}}),
    "rollout.maxSurge": _with("rollout", maxUnavailable=1),
    "slo": _with("slo", latencyMs=8000, devices=4, workload={"lengths": "32:512/1:128"}),
    "slo.kind": _with("slo", latencyMs=8000, devices=4, workload={"lengths": "8/8", "requestsPerMinute": 5}),
    "slo.workload.requestsPerMinute": _with(
        "slo", latencyMs=8000, devices=4, kind="requests", workload={"lengths": "8/8", "requestsPerMinute": 5}
    ),
}
"""Specs in which a field may be given, where the shortest one is not such a spec; the last that fits counts."""

UNSTATED_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "parallelism.stages": (1,),
    "parallelism.tensor": (1,),
    "scheduler.policy": ("iteration",),
    "scheduler.maxBatchSize": (16,),
}
"""Defaults that are not in the schema, since a plan must tell an omitted field from a given one."""

NOT_ALONE: Mapping[str, tuple[Any, ...]] = {"scheduler.maxBatchTokens": (1,), "scheduler.policy": ("rra",)}
"""Values that the schema of a field allows, and that are refused without other fields."""

_NAME = Examples(valid=("b-1.c",), invalid=("Upper", "a_b", "-a", "a.", "a..b", "a/b"))
"""Names of most objects: a DNS subdomain."""
_KEY = Examples(valid=("a.B_c-1", ".hidden"), invalid=("a b", "..", "..a", "a/b", "ä"))
"""Keys of a Secret."""
_HOST = Examples(
    valid=("b-1.example", "*.example", "localhost"),
    invalid=(
        "Upper.example",
        "a_b.example",
        "10.0.0.1",
        "a..b",
        "*",
        "*.*.example",
        "a.example:80",
        "https://a.example",
    ),
)
_IMAGE = Examples(valid=("registry.example:5000/team/image:1@sha256:0123",), invalid=(" i:1", "i:1 ", "a b", "-i"))
_LABELS = Examples(
    valid=({"gpu": "h100"}, {"example.com/gpu": ""}, {"gpu": "a" * 63}),
    invalid=({"gpu": 1}, {"gpu": "a" * 64}, {"gpu": "a b"}, {"": "a"}, {"a b": "c"}, {"A.example/b": "c"}),
)
_OWN_LABELS = (
    *("orca-serving.io/role", "argocd.argoproj.io/instance"),
    *(f"app.kubernetes.io/{key}" for key in ("name", "component", "managed-by", "instance")),
)
_MORE_LABELS = Examples(
    valid=({"team": "a"}, {"example.com/team": ""}, {"app.kubernetes.io/part-of": "chat"}),
    invalid=({"team": 1}, {"team": "a" * 64}, {"a b": "c"}, *({key: "a"} for key in _OWN_LABELS)),
)
_ANNOTATIONS = Examples(
    valid=({"a.example/b": ""}, {f"a.example/{n}": "a" * 2048 for n in range(64)}),
    invalid=({"a b": "c"}, {"a": 1}, {"a": "b" * 2049}, {f"a.example/{n}": "a" for n in range(65)}),
)
_MORE_ANNOTATIONS = Examples(valid=_ANNOTATIONS.valid, invalid=(*_ANNOTATIONS.invalid, {"orca-serving.io/stages": "1"}))
_PATCH = Examples(
    valid=({"spec": {"priorityClassName": "high"}}, {"metadata": {"annotations": {"a.example/b": "c"}}}),
    invalid=([],),
)
_REMOVE = Examples(
    valid=(
        ["/spec/securityContext/runAsUser"],
        ["/spec/securityContext/fsGroup", "/spec/securityContext/runAsGroup"],
        [f"/spec/{n}" for n in range(63)] + ["/spec/serviceAccountName"],
    ),
    invalid=(
        [""],
        ["/"],
        ["spec/a"],
        ["/spec"],
        ["/spec/"],
        ["/spec//a"],
        ["/spec/a/"],
        ["/spec/a~2"],
        ["/status/a"],
        ["/spec/" + "a" * 507],
        ["/spec/a", "/spec/a"],
        [f"/spec/{n}" for n in range(65)],
        [5],
        ["/metadata/labels"],
        ["/metadata/labels/orca-serving.io~1role"],
        ["/spec/containers"],
        ["/spec/containers/stage"],
        ["/spec/containers/stage/image"],
        ["/spec/containers/stage/ports/7000"],
        ["/spec/volumes"],
    ),
)
_REQUESTS = Examples(
    valid=(
        {"cpu": 1},
        {"cpu": "500m"},
        {"memory": "1.5Gi"},
        {"memory": "1e3"},
        {"cpu": "0"},
        {"ephemeral-storage": "1G"},
    ),
    invalid=({"cpu": "-1"}, {"cpu": -1}, {"cpu": "much"}, {"cpu": "1 "}, {"cpu": 0.5}, {"speed": "1"}, {"a b/c": "1"}),
)
_LIMITS = Examples(valid=(*_REQUESTS.valid, {"a.example/dongle": "2"}), invalid=_REQUESTS.invalid)
_POOL_LIMITS = Examples(
    valid=(*({"memory": amount} for amount in ("1984Mi", "2Gi", "2100M", "2.1e9", 2080374784)), {"cpu": 1}),
    invalid=(*_REQUESTS.invalid, *({"memory": amount} for amount in ("1983Mi", "1.5Gi", "2e9", "2000M", 2080374783))),
)
"""Redis may take 1984Mi when it has filled the default of memoryMiB."""
_TOLERATION = {
    "key": Examples(valid=("b", "a.example/b", ""), invalid=("a b", "-a", "a/b/c"), of_length=None),
    "value": Examples(valid=("b", "B_1"), invalid=("a b", "-a")),
}

EXAMPLES: Mapping[str, Examples] = {
    "slo.workload.lengths": Examples(
        valid=("1/1", "32:512/1:129", "128/1:320:128:68", "999999999/1", "1:9:4.5:2.25/2:3"),
        invalid=("", "8", "/", "8/", "0/8", "8/8/8", "8:/8", "8-16/8", "8:16:4/8", "a/b", " 8/8", "8/8 ", "1e3/8"),
        of_length=None,
    ),
    "parallelism.stageLayers": Examples(
        valid=([10, 6, 8], [1, 1, 1], [65536, 1, 2]),
        invalid=(
            [],
            [12, 12],
            [6, 6, 6, 6],
            [12, 0, 12],
            [12, -1, 13],
            [65537, 1, 1],
            [1.5, 1, 1],
            ["8", 8, 8],
            "8,8,8",
        ),
    ),
    "model.uri": Examples(
        valid=("file:///n/o", "hf://org/model", "s3://bucket/a/b", "pvc://claim", "pvc://claim/a/b"),
        invalid=(
            "m",
            "http://a.example/m",
            "file://m",
            "file:///",
            "file:///a b",
            "hf://model",
            "hf://-org/model",
            "hf://org/model/file",
            "s3://bucket",
            "s3://Bucket/a",
            "pvc://Claim",
            "pvc://a..b",
            "pvc://",
        ),
        of_length=lambda length: "file:///" + "a" * (length - 8),
    ),
    "model.revision": Examples(valid=("v1.0", "refs/pr/1", "0123abc"), invalid=("-f", "a b")),
    "model.endpoint": Examples(
        valid=("http://hub.example:8080/base", "https://hub.example"),
        invalid=("hub.example", "ftp://hub.example", "https://", "https://a b"),
        of_length=lambda length: "https://a/" + "a" * (length - 10),
    ),
    "model.servedName": Examples(valid=("gpt-5", "org/model:1"), invalid=("-f", "a b", "\n")),
    "model.tokenSecret.name": _NAME,
    "model.tokenSecret.key": _KEY,
    "model.cache.storageClassName": _NAME,
    "worker.networkInterface": Examples(valid=("eth0", "ib0.8001"), invalid=("eth 0", "a/b")),
    "worker.acceleratorResource": Examples(
        valid=("nvidia.com/mig-1g.10gb", "amd.com/gpu", "a/B_1"),
        invalid=(
            "",
            "gpu",
            "cpu",
            "nvidia.com/",
            "a b/c",
            "a/b/c",
            "a/" + "b" * 64,
            "kubernetes.io/gpu",
            "requests.a.b/c",
        ),
        of_length=None,
    ),
    "worker.rdmaResource.name": Examples(
        valid=("rdma/hca_a", "a/b"),
        invalid=("hca", "cpu", "nvidia.com/gpu", "rdma/", "rdma/a b", "rdma/a/b", "r/" + "a" * 64),
        of_length=None,
    ),
    "worker.runtimeClassName": _NAME,
    "gateway.apiKeysSecret.name": _NAME,
    "gateway.apiKeysSecret.key": _KEY,
    "metricNames": Examples(
        valid=(["vllm"], ["orca", "vllm"]), invalid=([], ["VLLM"], ["orca", "orca"], ["orca", "vllm", "other"])
    ),
    "gateway.corsOrigins": Examples(
        valid=(["*"], ["https://a.example", "app://obsidian.md"], [f"http://localhost:{n}" for n in range(32)]),
        invalid=(["a.example"], ["https://a.example/"], ["null"], ["*", "*"], [f"http://a:{n}" for n in range(33)]),
    ),
    "gateway.ingress.className": _NAME,
    "gateway.ingress.host": _HOST,
    "gateway.ingress.tlsSecretName": _NAME,
    "gateway.ingress.annotations": _ANNOTATIONS,
    "gateway.service.loadBalancerClass": Examples(
        valid=("internal", "service.k8s.aws/nlb", "A_1"),
        invalid=("a b", "/nlb", "a/b/c", "A.example/b"),
        of_length=None,
    ),
    "gateway.service.ipFamilies": Examples(
        valid=(["IPv4"], ["IPv6"]),
        invalid=([], ["IPv5"], ["IPv4", "IPv4"], ["IPv4", "IPv6", "IPv4"], [4]),
    ),
    "gateway.service.labels": _MORE_LABELS,
    "gateway.service.annotations": _MORE_ANNOTATIONS,
    "gateway.httpRoute.parentRefs[].name": _NAME,
    "gateway.httpRoute.parentRefs[].namespace": Examples(valid=("b-1",), invalid=("Upper", "a.b", "-a")),
    "gateway.httpRoute.parentRefs[].sectionName": _NAME,
    "gateway.httpRoute.hostnames": Examples(
        valid=(["b-1.example", "*.example"], [f"{n}.example" for n in range(16)]),
        invalid=([""], ["Upper.example"], ["10.0.0.1"], ["a"] * 17, [5]),
    ),
    "pool.managed.storageClassName": _NAME,
    "pool.external.urlSecret.name": _NAME,
    "pool.external.urlSecret.key": _KEY,
    "certificates.secretName": _NAME,
    "serviceAccount.name": _NAME,
    "serviceAccount.annotations": Examples(
        valid=({"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/a"}, {f"a.example/{n}": "" for n in range(32)}),
        invalid=_MORE_ANNOTATIONS.invalid,
    ),
    "spread.topologyKey": Examples(
        valid=("topology.kubernetes.io/zone", "rack", ""), invalid=("a b", "-a", "a/b/c", "A.example/b"), of_length=None
    ),
    "objectMetadata.labels": _MORE_LABELS,
    "objectMetadata.annotations": Examples(
        valid=({"a.example/b": ""}, {f"a.example/{n}": "a" * 2048 for n in range(32)}),
        invalid=(
            *_MORE_ANNOTATIONS.invalid,
            {"helm.sh/resource-policy": "keep"},
            {"argocd.argoproj.io/tracking-id": ""},
            {"volume.beta.kubernetes.io/storage-class": "fast"},
        ),
    ),
    "images.pullSecrets": Examples(
        valid=(["a"], [f"a{n}" for n in range(8)]),
        invalid=(["Upper"], [""], ["a", "a"], [f"a{n}" for n in range(9)], [5]),
    ),
    **{f"images.{role}": _IMAGE for role in ("gateway", "scheduler", "worker", "pool", "fetch")},
    **{f"{role}.resources.requests": _REQUESTS for role in ("worker", "scheduler", "gateway", "pool", "fetch")},
    **{f"{role}.resources.limits": _LIMITS for role in ("worker", "scheduler", "gateway", "fetch")},
    "pool.resources.limits": _POOL_LIMITS,
    **{f"{role}.podPatch": _PATCH for role in ("worker", "scheduler", "gateway", "pool", "fetch")},
    **{f"{role}.podPatchRemove": _REMOVE for role in ("worker", "scheduler", "gateway", "pool", "fetch")},
    **{f"{role}.nodeSelector": _LABELS for role in ("worker", "gateway")},
    **{f"{role}.tolerations[].{name}": of for role in ("worker", "gateway") for name, of in _TOLERATION.items()},
}
