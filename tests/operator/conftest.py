"""A real API server for the tests that want one, with the operator as a process of its own beside it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ApiServer, api_server, install_crd
from shop import POOL_SECRET, OperatorProcess, Shop

from cluster.programs.go_programs import ETCD, KUBERNETES
from orca.pool.redis.access import LOCAL_USER, LocalAccess
from orca.pool.redis.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    """Of an API server and its controllers, by name."""
    if not (ETCD.path.exists() and KUBERNETES.path.exists()):
        pytest.skip("no Kubernetes API server is here: `make cluster-up` builds it into the cache in some minutes")
    names = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
    return {name: KUBERNETES.folder / name for name in names} | {"etcd": ETCD.path}


@pytest.fixture(scope="session")
def server(programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """With the real controllers and scheduler, and the CRD."""
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


@pytest.fixture(scope="session")
def redis_login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URL and login of a Redis on loopback, whose user may touch every deployment's keys."""
    folder = tmp_path_factory.mktemp("redis")
    access = LocalAccess.prepare(folder, "any")
    access.acl_file.write_text(f"user default off\nuser {LOCAL_USER} on >{access.password} ~* &* +@all\n")
    with EmbeddedRedis(folder, access=access, port=0) as redis:
        yield {"url": redis.url, "user": LOCAL_USER, "password": access.password}


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[OperatorProcess]:
    process = OperatorProcess(server, tmp_path / "operator.log")
    process.start()
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()
