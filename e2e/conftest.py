"""What the scenarios share. They run in the cluster's network (`make e2e`), so they reach Services as its pods do."""

import secrets
from collections.abc import Iterator

import pytest

from cluster.cache import cache_folder
from cluster.kubectl import Kubectl
from cluster.layout import found_layout


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
