"""A cluster as plain data for tests of pure code: what the planner writes is there, the test says which pods live."""

import base64
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from orca.operator.cluster import credentials
from orca.operator.domain import names
from orca.operator.domain.actions import (
    Annotate,
    Apply,
    Delete,
    HandOver,
    IssueCertificate,
    PromiseSlots,
)
from orca.operator.domain.objects import Children, annotations
from orca.operator.domain.observation import Observation, PoolStatus, Release
from orca.operator.domain.resource import Json, OrcaDeployment
from orca.operator.plan.children import finish
from orca.operator.plan.plan import ReconcilePlan, make_plan
from orca.operator.plan.slo.in_force import with_plan_in_force
from support.operator.planned_files import check_body, plan_body, profile_body

RELEASE = Release(gateway="gateway:1", scheduler="scheduler:1", worker="worker:1", pool="pool:1", fetch="fetch:1")
POOL_URL = base64.b64encode(b"redis://redis.example:6379").decode()
"""URL of an external pool, as a Secret has it."""
BORN = "2026-01-01T00:00:00Z"
BORN_S = 1_767_225_600.0


class FakeCluster:
    """Objects by (kind, name). Controllers and kubelets are the test's own: `start`, `add_pod`."""

    def __init__(self, deployment: OrcaDeployment) -> None:
        self.deployment = deployment
        self.objects: dict[tuple[str, str], Json] = {}
        self.pool = PoolStatus()
        self.pool_secret: Json | None = {"data": {"users.acl": "", "password": "", "url": POOL_URL}}
        self.named_certificates: Json | None = None
        self.lost_nodes: frozenset[str] = frozenset()
        self.now_s = BORN_S + 1
        self.plan = plan_body()  # what the Job of a plan finds
        self.check = check_body()  # what the Job of a check finds

    @property
    def observed(self) -> Observation:
        return self.observe()

    def observe(self, release: Release = RELEASE, *, at: str | None = None) -> Observation:
        """Args: at: timestamp; None is the cluster's own time."""
        observation = Observation(
            deployment=self.deployment,
            release=release,
            now_s=self.now_s if at is None else datetime.fromisoformat(at).timestamp(),
            children=Children(dict(self.objects)),
            pool_secret=self.pool_secret,
            named_certificates=self.named_certificates,
            pool=self.pool,
            lost_nodes=self.lost_nodes,
        )
        return with_plan_in_force(observation)

    def reconcile(self, release: Release = RELEASE, *, dies_after: int | None = None) -> ReconcilePlan:
        """One plan, carried out. Args: dies_after: actions, with which the operator ends; None carries out all."""
        decided = make_plan(self.observe(release))
        for action in decided.actions[:dies_after]:
            if isinstance(action, Apply):
                self.write(action.manifest)
            elif isinstance(action, IssueCertificate):
                self.write(finish(self.deployment, certificates_secret(self.deployment, self.now_s)))
            elif isinstance(action, HandOver):
                self.scale(action.manifest["spec"]["replicas"], names.REPLICAS_MANAGER, "Apply")
            elif isinstance(action, Annotate):
                metadata = self.objects[action.kind, action.name]["metadata"]
                metadata["annotations"] = {**annotations(metadata), **action.annotations}
            elif isinstance(action, PromiseSlots):
                self.pool = replace(self.pool, promised_slots=action.slots)
            else:
                self._delete(action)
        return decided

    def settle(self, release: Release = RELEASE) -> list[ReconcilePlan]:
        """Reconcile and let all pods run, until a reconcile finds nothing to do."""
        plans = [self.reconcile(release)]
        for _ in range(100):
            self.start()
            plans.append(self.reconcile(release))
            if not plans[-1].actions:
                return plans
        raise AssertionError(f"still at it: {plans[-1].actions}")

    def write(self, manifest: Json) -> None:
        key = manifest["kind"], manifest["metadata"]["name"]
        there = self.objects.get(key, {"metadata": {"generation": 0}})
        generation = there["metadata"]["generation"] + 1
        written = datetime.fromtimestamp(self.now_s, UTC).isoformat()
        marks = {
            "managedFields": [{"manager": names.MANAGER, "time": written}],
            "creationTimestamp": BORN,
            "uid": f"uid-{key[1]}",
            "generation": generation,
        }
        self.objects[key] = {"status": there.get("status", {}), **manifest, "metadata": marks | manifest["metadata"]}
        # It is written apart from its object: an apply of the object leaves it.
        if (mark := annotations(there["metadata"]).get(names.FETCHED_ANNOTATION)) is not None:
            metadata = self.objects[key]["metadata"]
            metadata["annotations"] = {**annotations(metadata), names.FETCHED_ANNOTATION: mark}
        if key[0] == "Deployment":
            self._own_replicas(self.objects[key], there)

    def scale(self, gateways: int, manager: str = "autoscaler", operation: str = "Update") -> None:
        """Set the number of gateways, as an autoscaler does."""
        name = names.gateway(self.deployment.name)
        there = self.objects["Deployment", name]
        owner = _owner(manager, operation)
        metadata = {**there["metadata"], "managedFields": [_owner(names.MANAGER, "Apply", has_replicas=False), owner]}
        self.objects["Deployment", name] = {
            **there,
            "metadata": metadata,
            "spec": there["spec"] | {"replicas": gateways},
        }

    def _own_replicas(self, written: Json, there: Json) -> None:
        """A number that an apply leaves out stays if another manager has it; otherwise it is 1."""
        if "replicas" in written["spec"]:
            written["metadata"]["managedFields"] = [_owner(names.MANAGER, "Apply")]
            return
        others = [each for each in there["metadata"].get("managedFields", ()) if each["manager"] != names.MANAGER]
        number = there["spec"]["replicas"] if others else 1
        written["spec"] = written["spec"] | {"replicas": number}
        written["metadata"]["managedFields"] = [_owner(names.MANAGER, "Apply", has_replicas=False), *others]

    def start(self) -> None:
        """All pods of all controllers are there, ready and of the newest template; Jobs have done their work."""
        for name in self.names("Job"):
            self.end_job(name, "Complete")
            self.leave_result(name)
        self.start_pods()

    def start_pods(self) -> None:
        """All pods that serve are there, ready and of the newest template; Jobs are as they were."""
        for (kind, name), child in list(self.objects.items()):
            if kind in ("StatefulSet", "Deployment"):
                replicas = child["spec"]["replicas"]
                counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), replicas)
                child["status"] = {"observedGeneration": child["metadata"]["generation"], **counts}
                if replicas == 0:
                    self._end_pods(name)
                for index in range(replicas):
                    template = child["spec"]["template"]
                    if ("Pod", f"{name}-{index}") in self.objects:
                        self.objects["Pod", f"{name}-{index}"]["status"]["conditions"][0]["status"] = "True"
                    else:
                        self.add_pod(f"{name}-{index}", template["metadata"]["labels"])
                    pod = self.objects["Pod", f"{name}-{index}"]
                    pod["spec"] |= template["spec"]
                    given = template["metadata"].get("annotations") or {}
                    pod["metadata"]["annotations"] = (pod["metadata"].get("annotations") or {}) | given

    def add_pod(self, name: str, labels: Json, *, is_ready: bool = True, node: str | None = "node-1") -> None:
        status = {"conditions": [{"type": "Ready", "status": str(is_ready), "lastTransitionTime": BORN}]}
        spec: dict[str, Any] = {} if node is None else {"nodeName": node}
        self.objects["Pod", name] = {
            "kind": "Pod",
            "metadata": {"name": name, "uid": f"uid-{name}", "labels": dict(labels), "creationTimestamp": BORN},
            "spec": spec,
            "status": status,
        }
        if jobs := [job for job in self.names("Job") if name.startswith(f"{job}-")]:
            self.objects["Pod", name]["metadata"]["ownerReferences"] = [{"uid": f"uid-{jobs[0]}", "controller": True}]

    def make_unready(self, pod: str, *, node: str | None = "node-1") -> None:
        """Another pod takes its place, and is not ready."""
        self.add_pod(pod, self.objects["Pod", pod]["metadata"]["labels"], is_ready=False, node=node)

    def end_job(self, name: str, how: str, at: str = BORN) -> None:
        """Args: how: Complete or Failed. at: timestamp."""
        condition = {"type": how, "status": "True", "lastTransitionTime": at, "message": "its pod has failed"}
        self.objects["Job", name]["status"] = {"conditions": [condition]}

    def leave_result(self, job: str, body: bytes | None = None) -> None:
        """Leave the result of a Job of a plan in the pool. Args: body: None for a good one."""
        good = {names.PROFILE: profile_body(), names.PLAN: self.plan, names.FOLLOW: self.check}
        body = body or good.get(self.objects["Job", job]["metadata"]["labels"][names.ROLE_LABEL])
        if body is not None:
            self.pool = replace(self.pool, results={**self.pool.results, job: body})

    def names(self, kind: str, role: str | None = None) -> list[str]:
        return sorted(
            name
            for (of, name), child in self.objects.items()
            if of == kind and role in (None, child["metadata"]["labels"].get(names.ROLE_LABEL))
        )

    def _delete(self, action: Delete) -> None:
        """Delete the object with its pods, as the garbage collector does."""
        gone = self.objects.pop((action.kind, action.name), None)
        assert gone is None or gone["metadata"]["uid"] == action.uid
        if action.kind in ("StatefulSet", "Deployment"):
            self._end_pods(action.name)

    def _end_pods(self, controller: str) -> None:
        for kind, name in list(self.objects):
            if kind == "Pod" and name.rpartition("-")[0] == controller:
                del self.objects[kind, name]


def _owner(manager: str, operation: str, *, has_replicas: bool = True) -> Json:
    fields = {"f:spec": {"f:replicas": {}} if has_replicas else {}}
    return {"manager": manager, "operation": operation, "time": BORN, "fieldsV1": fields}


_SIGNER = ec.generate_private_key(ec.SECP256R1())
_issued: dict[tuple[str, str, float], Json] = {}


def certificates_secret(deployment: OrcaDeployment, issued_s: float) -> Json:
    """The operator's own, with the same CA in all tests, and the same content for the same time."""
    key = deployment.name, deployment.namespace, issued_s
    if key not in _issued:
        _issued[key] = credentials.certificates_secret(deployment, IssueCertificate("", _SIGNER), issued_s)
    return _issued[key]


def observation(of: OrcaDeployment, children: dict[tuple[str, str], Json] | None = None, **facts: Any) -> Observation:
    """Return the observation of a cluster that has only the children."""
    fields = {"release": RELEASE, "now_s": BORN_S, **facts}
    return Observation(deployment=of, children=Children(children or {}), **fields)
