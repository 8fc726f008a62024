"""From nothing to the first token: the chart, five lines, and the `openai` client through the Ingress with a key."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI

from cluster.kubectl import Kubectl
from figures import note
from installation import FIVE_LINES, OPERATOR_NAMESPACE, Service, helm, install_chart, wait_until

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
    service.edit(gateway={"ingress": {"className": "traefik", "host": service.host}}, worker={"threads": 1})
    service.wait_for("PoolReady", "True")
    done("pool answers")
    service.wait_for("GatewayReady", "True")
    done("gateway is up")
    service.wait_for("Ready", "True", "Serving")
    done("group has formed, Ready")
    client = OpenAI(base_url=service.base_url, api_key=service.api_key(), default_headers=service.headers)
    wait_until(lambda: is_routed(client), service.story)
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
    note("first_token", seconds)


def is_routed(client: OpenAI) -> bool:
    """Whether the Ingress leads to a gateway by now."""
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
    helm("upgrade", "orca", str(changed), "--namespace", OPERATOR_NAMESPACE, "--reuse-values")
    definition = kubectl.get("customresourcedefinition", "orcadeployments.orca-serving.io")
    assert "status.changed" in json.dumps(definition["spec"]["versions"][0]["additionalPrinterColumns"])
    helm("uninstall", "orca", "--namespace", OPERATOR_NAMESPACE, "--wait")
    left = kubectl(
        "get", "all,configmaps,serviceaccounts", f"--namespace={OPERATOR_NAMESPACE}", "--output=name"
    ).split()
    assert sorted(left) == ["configmap/kube-root-ca.crt", "serviceaccount/default"]
    assert service.get()["metadata"]["name"] == service.name
    kubectl("delete", "orca", service.name, f"--namespace={namespace}")
    wait_until(lambda: not service.pods(), service.story, within_s=90)
    claims = kubectl("get", "persistentvolumeclaims", f"--namespace={namespace}", "--output=name").split()
    assert claims == [f"persistentvolumeclaim/{service.name}-pool"]
    install_chart()


def changed_chart(folder: Path) -> Path:
    """The chart as a later release may have it: one printer column more."""
    chart = folder / "orca"
    subprocess.run(["cp", "-r", str(FIVE_LINES.parents[1]), str(chart)], check=True)
    definition = chart / "crd" / "orcadeployments.yaml"
    column = "        - {name: Changed, type: string, jsonPath: .status.changed}\n"
    definition.write_text(definition.read_text().replace("        - {name: URL,", f"{column}        - {{name: URL,", 1))
    return chart
