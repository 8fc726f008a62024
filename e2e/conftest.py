"""What the scenarios share. On a cluster of `make e2e` they run in its network, and reach Services as its pods do."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cluster.kubernetes.kubectl import Kubectl
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Layout
from installation import Service, connect, install_chart, make_namespace, own_layout, target, wait_until
from load import Load
from orca.core.domain.errors import SettingError
from visit import visit


def pytest_configure() -> None:
    """What is missing is told before anything runs."""
    try:
        target()
    except SettingError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def kubectl() -> Iterator[Kubectl]:
    kubectl = connect()
    with ExitStack() as ends:
        if not target().is_ours:
            try:
                ends.enter_context(visit(kubectl))
            except ClusterError as error:
                pytest.exit(str(error), returncode=2)
        yield kubectl


@pytest.fixture(scope="session")
def layout() -> Layout:
    """For scenarios with the mark `own_cluster`."""
    return own_layout()


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    """Of this test alone; with it goes all that the test made in it."""
    name = make_namespace(kubectl, "test")
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
    namespace = make_namespace(kubectl, "changes")
    install_chart()
    service = Service(kubectl, namespace)
    service.create({**SPEC, "gateway": {**SPEC["gateway"], "ingress": service.ingress}})
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What judges all other scenarios comes behind them; what needs our own cluster is not run on another."""
    items.sort(key=lambda item: item.path.parent.name == "rights")
    reason = f"needs the nodes, the network or the audit log of our own cluster, and {target().context} is another"
    for item in items:
        if item.get_closest_marker("own_cluster") and not target().is_ours:
            item.add_marker(pytest.mark.skip(reason=reason))
