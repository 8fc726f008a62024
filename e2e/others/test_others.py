"""Others write to the cluster too: tools that prune, autoscalers, quotas, a second release of the operator.

Each case runs under load. No answer is missing or wrong, and the resource says what stands in the way.
"""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from cluster.machine.errors import ClusterError
from figures import record_figures
from installation import CHART, Json, Service, helm, target, wait_until
from load import Load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Case = Callable[[Service], AbstractContextManager[None]]
"""A case runs to its `yield` under load, and then cleans up."""


def gateway_deployment(service: Service) -> Json:
    return service.kubectl.get("deployment", f"{service.name}-gateway", f"--namespace={service.namespace}")


def event_reasons(service: Service) -> set[str]:
    """Return the reasons of the events about the OrcaDeployment."""
    events = service.kubectl.get("events", f"--namespace={service.namespace}")["items"]
    return {each["reason"] for each in events if each["involvedObject"]["kind"] == "OrcaDeployment"}


@contextlib.contextmanager
def prune_by_label(service: Service) -> Iterator[None]:
    """Delete everything that has the label of an app of this name and no owner, as Argo CD's prune does."""
    kinds = "persistentvolumeclaims,secrets,services,configmaps,statefulsets,deployments"
    selector = f"--selector=app.kubernetes.io/instance={service.name}"
    service.kubectl("delete", kinds, selector, f"--namespace={service.namespace}", "--ignore-not-found", "--wait=false")
    service.wait_until_settled()
    yield


@contextlib.contextmanager
def pool_secret_deleted(service: Service) -> Iterator[None]:
    """Delete the password of the pool: it is drawn anew, and an Event says so."""
    service.kubectl("delete", "secret", f"{service.name}-pool", f"--namespace={service.namespace}")
    wait_until(lambda: "SecretDrawn" in event_reasons(service), service.describe, within_s=180)
    service.wait_until_settled()
    yield


@contextlib.contextmanager
def variable_added(service: Service) -> Iterator[None]:
    """Add a variable to the gateways, as Reloader and `kubectl set env` do: it stays, and the resource is ready."""
    where = f"--namespace={service.namespace}"
    deployment = f"deployment/{service.name}-gateway"
    service.kubectl("set", "env", deployment, "ADDED=1", where)
    service.kubectl("rollout", "status", deployment, where, "--timeout=180s")
    service.wait_for("Ready", "True")
    [container] = gateway_deployment(service)["spec"]["template"]["spec"]["containers"]
    assert any(each["name"] == "ADDED" for each in container["env"]), "what somebody added was taken away"
    yield
    service.kubectl("set", "env", deployment, "ADDED-", where)


@contextlib.contextmanager
def quota_in_the_way(service: Service) -> Iterator[None]:
    """Forbid further pods, then ask for another group: the status has the words of the API server."""
    count = len(service.pods())
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "full", "namespace": service.namespace},
        "spec": {"hard": {"pods": str(count)}},
    }
    where = f"--namespace={service.namespace}"
    service.kubectl("apply", "--filename=-", standard_input=json.dumps(quota))
    used = ("get", "resourcequota", "full", where, "--output=jsonpath={.status.used.pods}")
    wait_until(lambda: service.kubectl(*used) != "", service.describe)
    service.scale(2)
    wait_until(lambda: "exceeded quota" in json.dumps(service.get()["status"]), service.describe, within_s=180)
    yield
    service.kubectl("delete", "resourcequota", "full", where)
    service.scale(1)
    service.wait_until_settled()


@contextlib.contextmanager
def autoscaled(service: Service) -> Iterator[None]:
    """Let another program set the number of gateways: nobody writes it back."""
    service.edit(gateway={"autoscaled": True, "replicas": None})
    service.wait_until_settled()
    where = f"--namespace={service.namespace}"
    service.kubectl("scale", f"deployment/{service.name}-gateway", where, "--replicas=2")
    service.kubectl("rollout", "status", f"deployment/{service.name}-gateway", where, "--timeout=180s")
    service.edit(scheduler={"maxBatchSize": 8})
    service.wait_until_settled()
    assert gateway_deployment(service)["spec"]["replicas"] == 2, "the number of an autoscaler was written back"
    yield
    service.edit(gateway={"autoscaled": False, "replicas": 1}, scheduler={"maxBatchSize": 16})
    service.wait_until_settled()


@contextlib.contextmanager
def pods_patched(service: Service) -> Iterator[None]:
    """Mount one volume twice and leave a field out, by a merge patch, in which null is lost."""
    mounts = [{"name": "more", "mountPath": path} for path in ("/more/a", "/more/b")]
    patch = {
        "spec": {
            "volumes": [{"name": "more", "emptyDir": {}}],
            "containers": [{"name": "gateway", "volumeMounts": mounts}],
        }
    }
    try:
        service.edit(gateway={"podPatch": patch, "podPatchRemove": ["/spec/securityContext/runAsGroup"]})
        service.wait_until_settled()
        [pod] = service.pods("gateway")
        paths = {each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
        assert {"/more/a", "/more/b", "/tmp"} <= paths
        assert "runAsGroup" not in pod["spec"]["securityContext"]
        yield
    finally:
        service.edit(gateway={"podPatch": None, "podPatchRemove": None})
        service.wait_until_settled()


@contextlib.contextmanager
def too_little_memory(service: Service) -> Iterator[None]:
    """Give Redis less memory than it may fill: the edit is refused, and nothing restarts."""
    with pytest.raises(ClusterError, match="memoryMiB"):
        service.edit(pool={"resources": {"limits": {"memory": "64Mi"}}})
    service.wait_until_settled()
    yield


@contextlib.contextmanager
def second_release(service: Service) -> Iterator[None]:
    """Install the chart once more: the resource stays with its operator, and an Event says so."""
    namespace = f"orca-e2e-second-{secrets.token_hex(3)}"
    generation = gateway_deployment(service)["metadata"]["generation"]
    owner = service.get()["status"]["operator"]
    images = ("--set-string", f"images.tag={target().tag},images.registry={target().registry}")
    place = ("--namespace", namespace, "--create-namespace")
    options = ("--set", "crds.install=false")
    try:
        helm("install", "second", str(CHART), *place, "--wait", "--timeout", "3m", *images, *options, within_s=200)
        wait_until(lambda: "ServedByAnother" in event_reasons(service), service.describe, within_s=180)
        service.wait_until_settled()
        assert service.get()["status"]["operator"] == owner
        assert gateway_deployment(service)["metadata"]["generation"] == generation, "two operators write one object"
        yield
    finally:
        helm("uninstall", "second", "--namespace", namespace, "--wait")
        service.kubectl("delete", "namespace", namespace, "--wait=false")


CASES: dict[str, Case] = {
    "a prune by label": prune_by_label,
    "the Secret of the pool is deleted": pool_secret_deleted,
    "a variable is added to the gateways": variable_added,
    "a quota forbids another group": quota_in_the_way,
    "an autoscaler sets the gateways": autoscaled,
    "two mounts and a field less": pods_patched,
    "less memory than Redis may fill": too_little_memory,
    "a second release of the operator": second_release,
}


@pytest.mark.parametrize("name", CASES)
def test_what_others_write_costs_no_request(service: Service, load: Load, name: str) -> None:
    with load.running(), CASES[name](service):
        pass
    record_figures(f"others: {name}", load.summary())
    load.check()
