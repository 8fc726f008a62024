"""An empty cluster gives its first token: the chart, five lines, and the `openai` client with a key, through the
Ingress.
"""

import json
import subprocess
import time
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI

from cluster.kubernetes.kubectl import Kubectl
from figures import record_figures
from installation import FIVE_LINES, Service, helm, install_chart, target, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_five_lines_lead_to_a_stream_through_the_ingress(kubectl: Kubectl, namespace: str) -> None:
    began = time.monotonic()
    seconds: dict[str, float] = {}

    def done(step: str) -> None:
        seconds[step] = round(time.monotonic() - began, 1)

    notes = install_chart()
    assert "kubectl apply" in notes
    done("operator is up (helm --wait)")
    kubectl("apply", "--namespace", namespace, "--filename", str(FIVE_LINES))
    service = Service(kubectl, namespace)
    service.edit(gateway={"ingress": service.ingress}, worker={"threads": 1})
    service.wait_for("PoolReady", "True")
    done("pool answers")
    service.wait_for("GatewayReady", "True")
    done("gateway is up")
    service.wait_for("Ready", "True", "Serving")
    done("group has formed, Ready")
    client = OpenAI(base_url=service.base_url, api_key=service.api_key(), default_headers=service.headers)
    wait_until(lambda: is_routed(client), service.describe)
    with client.completions.create(
        model="orca-austen", prompt="It was a fine morning, and", max_tokens=40, temperature=0, stream=True
    ) as stream:
        texts = []
        for event in stream:
            if not texts:
                done("first token at the client")
            texts.append(event.choices[0].text)
    done("last of 40 tokens")
    assert len("".join(texts).split()) > 10
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=service.base_url, api_key="none", default_headers=service.headers).models.list()
    record_figures("first_token", seconds)


def is_routed(client: OpenAI) -> bool:
    """Does the Ingress lead to a gateway now?"""
    try:
        return [model.id for model in client.models.list()] == ["orca-austen"]
    except Exception:
        return False


def test_an_upgrade_brings_a_changed_definition_and_an_uninstall_keeps_what_people_have(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    install_chart()
    service = Service(kubectl, namespace)
    service.create({"model": {"uri": "file:///opt/orca/models/orca-austen"}, "replicas": 0})
    service.wait_for("Ready", "True", "Holding")
    changed = changed_chart(tmp_path)
    operator_namespace = target().operator_namespace
    helm("upgrade", "orca", str(changed), "--namespace", operator_namespace, "--reuse-values")
    definition = kubectl.get("customresourcedefinition", "orcadeployments.orca-serving.io")
    assert "status.changed" in json.dumps(definition["spec"]["versions"][0]["additionalPrinterColumns"])
    helm("uninstall", "orca", "--namespace", operator_namespace, "--wait")
    wait_until(lambda: not of_orca(kubectl, operator_namespace), lambda: str(of_orca(kubectl, operator_namespace)))
    left = [definition["metadata"]["name"], *of_orca(kubectl, namespace)]
    kubectl("delete", "orca", service.name, f"--namespace={namespace}")
    kept = [
        f"persistentvolumeclaim/{service.name}-pool",
        f"secret/{service.name}-api-key",
        f"secret/{service.name}-certificates",
        f"secret/{service.name}-pool",
    ]
    wait_until(lambda: of_orca(kubectl, namespace) == kept, lambda: str(of_orca(kubectl, namespace)), within_s=90)
    record_figures("uninstall", {"left by the release": left, "left by the resource": kept})
    install_chart()


def of_orca(kubectl: Kubectl, namespace: str) -> list[str]:
    """Return the objects in the namespace, except those that Kubernetes puts into every namespace."""
    kinds = (
        "all,configmaps,secrets,serviceaccounts,persistentvolumeclaims,ingresses,networkpolicies,poddisruptionbudgets"
    )
    found = kubectl("get", kinds, f"--namespace={namespace}", "--output=name").split()
    return sorted(set(found) - {"configmap/kube-root-ca.crt", "serviceaccount/default"})


def changed_chart(folder: Path) -> Path:
    """Return the chart of a later release, which has one more printer column."""
    chart = folder / "orca"
    subprocess.run(["cp", "-r", str(FIVE_LINES.parents[1]), str(chart)], check=True)
    definition = chart / "crd" / "orcadeployments.yaml"
    column = "        - {name: Changed, type: string, jsonPath: .status.changed}\n"
    definition.write_text(definition.read_text().replace("        - {name: URL,", f"{column}        - {{name: URL,", 1))
    return chart
