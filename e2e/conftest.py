"""Fixtures of all scenarios. On the cluster of `make e2e` they run in its network, and reach Services like its pods."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cluster.kubernetes.kubectl import Kubectl
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Layout
from foreign_cluster import use_foreign_cluster
from installation import SPEC, Service, connect, install_chart, make_namespace, own_layout, target, wait_until
from load import Load, is_answering
from orca.core.domain.errors import SettingError


def pytest_configure() -> None:
    """Report missing settings before anything runs."""
    try:
        target()
    except SettingError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def kubectl() -> Iterator[Kubectl]:
    kubectl = connect()
    with ExitStack() as ends:
        if not target().is_own:
            try:
                ends.enter_context(use_foreign_cluster(kubectl))
            except ClusterError as error:
                pytest.exit(str(error), returncode=2)
        yield kubectl


@pytest.fixture(scope="session")
def layout() -> Layout:
    """Return the layout of the own cluster, for scenarios with the mark `own_cluster`."""
    return own_layout()


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    """Make a namespace for one test, and delete it with its contents after the test."""
    name = make_namespace(kubectl, "test")
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def service(kubectl: Kubectl) -> Iterator[Service]:
    """Return a service that serves, for all scenarios that change or damage it."""
    namespace = make_namespace(kubectl, "changes")
    install_chart()
    service = Service(kubectl, namespace)
    service.create({**SPEC, "gateway": {**SPEC["gateway"], "ingress": service.ingress}})
    service.wait_until_settled()
    yield service
    kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="session")
def load(service: Service) -> Load:
    load = Load(service)
    wait_until(lambda: is_answering(load), service.describe)
    return load


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the scenario that judges all others to the end; skip scenarios that another cluster cannot run."""
    items.sort(key=lambda item: item.path.parent.name == "rights")
    reason = f"needs the nodes, the network or the audit log of the own cluster, and {target().context} is another"
    for item in items:
        if item.get_closest_marker("own_cluster") and not target().is_own:
            item.add_marker(pytest.mark.skip(reason=reason))
