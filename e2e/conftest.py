"""What the scenarios share. They run in the cluster's network (`make e2e`), so they reach Services as its pods do."""

import secrets
from collections.abc import Iterator

import pytest

from cluster.cache import cache_folder
from cluster.kubectl import Kubectl
from cluster.layout import found_layout
from installation import Service, install_chart, wait_until
from load import Load


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    return Kubectl(found_layout(cache_folder() / "cluster"))


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    """Of this test alone; with it goes all that the test made in it."""
    name = f"test-{secrets.token_hex(3)}"
    kubectl("create", "namespace", name)
    kubectl("wait", "--for=create", f"--namespace={name}", "serviceaccount/default", "--timeout=30s")
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


SPEC = {
    "model": {"uri": "file:///opt/orca/models/orca-austen"},
    "worker": {"threads": 1},
    # Quick ends of gateways: what is streamed here takes seconds.
    "gateway": {"drainSeconds": 60},
}


@pytest.fixture(scope="session")
def service(kubectl: Kubectl) -> Iterator[Service]:
    """One that serves, for all scenarios that change or hurt it."""
    install_chart()
    namespace = f"changes-{secrets.token_hex(3)}"
    kubectl("create", "namespace", namespace)
    service = Service(kubectl, namespace)
    gateway = {**SPEC["gateway"], "ingress": {"className": "traefik", "host": service.host}}
    service.create({**SPEC, "gateway": gateway})
    service.wait_settled()
    yield service
    kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="session")
def load(service: Service) -> Load:
    load = Load(service)
    wait_until(lambda: answers(load), service.story)
    return load


def answers(load: Load) -> bool:
    """Whether the Ingress leads to a gateway by now; learns the undisturbed answers."""
    try:
        load.learn()
    except Exception:
        return False
    return True
