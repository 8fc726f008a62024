"""A real API server for the tests that want one, with the operator as a process of its own beside it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.programs.go_programs import ETCD, KUBERNETES
from support.operator.api_server import ApiServer, api_server, install_crd
from support.operator.redis_login import redis_login
from support.operator.shop import POOL_SECRET, OperatorProcess, Shop

__all__ = ["redis_login"]


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    """The programs of an API server and its controllers, by name."""
    if not (ETCD.path.exists() and KUBERNETES.path.exists()):
        pytest.skip("no Kubernetes API server is here; to build it: cd e2e && ../.venv/bin/python -m cluster binaries")
    names = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    return {name: KUBERNETES.folder / name for name in names} | {"etcd": ETCD.path}


@pytest.fixture(scope="session")
def server(programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Start an API server with the real controllers and scheduler, and with the CRD."""
    with api_server(programs, tmp_path_factory.mktemp("api-server"), controllers=True) as started:
        install_crd(started)
        yield started


@pytest.fixture
def shop(server: ApiServer, redis_login: dict[str, str], request: pytest.FixtureRequest) -> Shop:
    """A namespace of this test, with the Secret of its pool."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**9}"
    shop = Shop(server, name)
    shop.core.create_namespace({"metadata": {"name": name}})
    shop.core.create_namespaced_secret(name, {"metadata": {"name": POOL_SECRET}, "stringData": redis_login})
    return shop


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[OperatorProcess]:
    process = OperatorProcess(server, tmp_path / "operator.log")
    process.start()
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()
