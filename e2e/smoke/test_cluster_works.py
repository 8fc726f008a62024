"""The cluster works: pods run, names resolve, Services and Ingress lead to pods, volumes outlive pods."""

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from cluster.kubernetes.kubectl import Kubectl
from cluster.machine.errors import ClusterError
from cluster.machine.layout import INGRESS_ADDRESS, Layout
from manifests import asking_pod, claim, ingress, pod, service, web_pod

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster, pytest.mark.timeout(180)]
LIMIT = "--timeout=60s"


def wait_until(is_so: Callable[[], bool], *, within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, f"not within {within_s:.0f} s"
        time.sleep(0.1)


def said(kubectl: Kubectl, namespace: str, name: str) -> str:
    """Return the output of a pod after its success."""
    in_time = ("wait", f"--namespace={namespace}", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", LIMIT)
    kubectl(*in_time, within_s=90)
    return kubectl("logs", f"--namespace={namespace}", name)


def wait_ready(kubectl: Kubectl, namespace: str, name: str) -> None:
    kubectl("wait", f"--namespace={namespace}", f"pod/{name}", "--for=condition=Ready", LIMIT, within_s=90)


def answer_of(host: str) -> str:
    """Return the answer of a host through the Ingress; empty while the Ingress does not know it."""
    request = urllib.request.Request(f"http://{INGRESS_ADDRESS}/", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError:
        return ""


@pytest.mark.parametrize("node", ["node-0", "node-1"])
def test_a_pod_runs_on_each_node_and_its_words_are_read_back(kubectl: Kubectl, namespace: str, node: str) -> None:
    kubectl.apply([pod(namespace, "speaker", "echo here; id -u", node=node)])
    assert said(kubectl, namespace, "speaker") == "here\n65532\n"


def test_a_command_runs_inside_a_pod(kubectl: Kubectl, namespace: str) -> None:
    kubectl.apply([web_pod(namespace, "web", "hello")])
    wait_ready(kubectl, namespace, "web")
    assert kubectl("exec", f"--namespace={namespace}", "web", "--", "hostname") == "web\n"


def test_a_service_answers_by_its_name_to_a_pod_of_another_node(kubectl: Kubectl, namespace: str) -> None:
    kubectl.apply([web_pod(namespace, "web", "hello", node="node-1"), service(namespace, "web")])
    wait_ready(kubectl, namespace, "web")
    kubectl.apply([asking_pod(namespace, "asker", f"web.{namespace}.svc.cluster.local", node="node-0")])
    assert said(kubectl, namespace, "asker") == "hello\n"


def test_an_ingress_leads_a_host_name_to_its_service(kubectl: Kubectl, namespace: str) -> None:
    kubectl.apply([web_pod(namespace, "web", "hello"), service(namespace, "web")])
    kubectl.apply([ingress(namespace, "web", f"{namespace}.example")])
    wait_ready(kubectl, namespace, "web")
    wait_until(lambda: answer_of(f"{namespace}.example") == "hello\n")


def test_a_claim_keeps_its_file_and_node_over_the_death_of_its_pod(kubectl: Kubectl, namespace: str) -> None:
    kubectl.apply([claim(namespace, "kept")])
    kubectl.apply([pod(namespace, "writer", "echo kept > /data/file", node="node-1", claim="kept")])
    said(kubectl, namespace, "writer")
    kubectl("delete", "pod", f"--namespace={namespace}", "writer", within_s=90)
    kubectl.apply([pod(namespace, "reader", "cat /data/file", claim="kept")])
    assert said(kubectl, namespace, "reader") == "kept\n"
    assert kubectl.get("pod", f"--namespace={namespace}", "reader")["spec"]["nodeName"] == "node-1"


def test_a_pod_that_asks_for_rights_is_refused(kubectl: Kubectl, namespace: str) -> None:
    greedy = pod(namespace, "greedy", "true")
    greedy["spec"]["securityContext"]["runAsNonRoot"] = False
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        kubectl.apply([greedy])


def test_no_way_leads_out_of_the_cluster(kubectl: Kubectl, namespace: str) -> None:
    kubectl.apply([pod(namespace, "looker", "ip route")])
    in_pod = said(kubectl, namespace, "looker")
    here = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    assert in_pod.startswith("default via 10.244.")
    assert "default" not in here


def test_calls_of_the_api_are_kept_for_comparison_with_rights(layout: Layout, namespace: str) -> None:
    found = layout.audit_log
    wait_until(lambda: f'"requestURI":"/api/v1/namespaces/{namespace}' in found.read_text())
