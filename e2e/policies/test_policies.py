"""NetworkPolicies by a switch of the chart: they come and go. The cluster's network does not enforce them."""

import pytest

from cluster.kubernetes.kubectl import Kubectl
from installation import SPEC, Service, install_chart, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster, pytest.mark.timeout(300)]


def test_policies_come_and_go_with_their_switch(kubectl: Kubectl, namespace: str) -> None:
    service = Service(kubectl, namespace)
    try:
        install_chart("networkPolicies.deployments=true")
        service.create({**SPEC, "replicas": 0})
        service.wait_for("Ready", "True", "Holding")
        wait_until(lambda: len(policies(service)) >= 3, lambda: str(policies(service)))
    finally:
        install_chart()
    wait_until(lambda: not policies(service), lambda: str(policies(service)))


def policies(service: Service) -> list[str]:
    return service.kubectl("get", "networkpolicies", f"--namespace={service.namespace}", "--output=name").split()
