"""Clients connect through the Gateway API instead of an Ingress: Traefik serves the Gateway, the operator writes the
HTTPRoute.
"""

import pytest

from cluster.kubernetes.kubectl import Kubectl
from cluster.kubernetes.services import INGRESS_PORT
from figures import record_figures
from installation import SPEC, Service, install_chart, wait_until
from load import Load, is_answering

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster, pytest.mark.timeout(300)]


def test_clients_come_through_an_http_route_until_they_come_by_an_ingress_again(
    kubectl: Kubectl, namespace: str
) -> None:
    install_chart()
    kubectl.apply([gateway(namespace)])
    service = Service(kubectl, namespace)
    route = {"parentRefs": [{"name": "public"}], "hostnames": [service.host]}
    service.create({**SPEC, "gateway": {"httpRoute": route}})
    service.wait_until_settled()
    assert service.get()["status"]["url"] == f"http://{service.host}/v1"
    load = Load(service)
    wait_until(lambda: is_answering(load), service.describe)
    with load.running():
        pass
    record_figures("http route", load.summary())
    load.check()
    service.edit(gateway={"httpRoute": None, "ingress": service.ingress})
    wait_until(lambda: doors(service) == ["ingress.networking.k8s.io/austen"], service.describe)
    service.edit(gateway={"ingress": None})
    wait_until(lambda: not doors(service), service.describe)


def doors(service: Service) -> list[str]:
    return service.kubectl("get", "httproutes,ingresses", f"--namespace={service.namespace}", "--output=name").split()


def gateway(namespace: str) -> dict[str, object]:
    """Return the Gateway of the platform team; it does not belong to Orca."""
    listener = {"name": "web", "protocol": "HTTP", "port": INGRESS_PORT}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": "public", "namespace": namespace},
        "spec": {"gatewayClassName": "traefik", "listeners": [listener]},
    }
