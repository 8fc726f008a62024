"""An operator of single namespaces, with a Role in each: one of them is deleted, and comes back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from support.operator.api_server import ApiServer
from support.operator.shop import POOL_SECRET, WITHIN_S, OperatorProcess, Shop
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HOME = "operator-of-two"
OTHER = "b-of-two"


def grant(server: ApiServer, namespace: str) -> None:
    """All rights inside a namespace, as the chart's Role gives some."""
    rights = client.RbacAuthorizationV1Api(server.api())
    rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    rights.create_namespaced_role(namespace, {"metadata": {"name": "operator"}, "rules": [rule]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"}
    subject = {"kind": "ServiceAccount", "name": "operator", "namespace": HOME}
    binding = {"metadata": {"name": "operator"}, "roleRef": role, "subjects": [subject]}
    rights.create_namespaced_role_binding(namespace, binding)


@pytest.fixture
def of_two(server: ApiServer, shop: Shop, tmp_path: Path) -> Iterator[OperatorProcess]:
    core = client.CoreV1Api(server.api())
    for name in (HOME, OTHER):
        core.create_namespace({"metadata": {"name": name}})
    core.create_namespaced_service_account(HOME, {"metadata": {"name": "operator"}})
    token = core.create_namespaced_service_account_token("operator", HOME, {"spec": {"audiences": []}}).status.token
    for name in (shop.namespace, OTHER):
        grant(server, name)
    where = ("--namespaces", f"{shop.namespace},{OTHER}")
    kubeconfig = server.write_kubeconfig(tmp_path / "of-two", server.url, token)
    operator = OperatorProcess(server, tmp_path / "of-two.log", *where, kubeconfig=kubeconfig)
    operator.start()
    yield operator
    operator.kill()


def refused(operator: OperatorProcess) -> int:
    try:
        return operator.metric("orca_operator_refused_namespaces")
    except OSError:
        return -1


def is_gone(core: client.CoreV1Api, namespace: str) -> bool:
    try:
        core.read_namespace(namespace)
    except client.ApiException as error:
        return bool(error.status == 404)
    return False


def test_a_namespace_that_is_deleted_and_made_again_never_troubles_the_other(
    shop: Shop, server: ApiServer, of_two: OperatorProcess
) -> None:
    login = {"metadata": {"name": POOL_SECRET}, "stringData": shop.pool_login()}
    wait_until(lambda: refused(of_two) == 0, WITHIN_S, lambda: of_two.log)
    shop.core.delete_namespace(OTHER)
    wait_until(lambda: is_gone(shop.core, OTHER), WITHIN_S)
    wait_until(lambda: refused(of_two) == 1, WITHIN_S, lambda: of_two.log)
    assert of_two.log.count(f"the namespace {OTHER} is not served") == 1
    shop.create()
    wait_until(lambda: len(shop.groups()) == 1, WITHIN_S, lambda: of_two.log[-3000:])

    # Also an operator that starts without it serves the other, and is healthy.
    of_two.kill()
    of_two.start()
    wait_until(lambda: refused(of_two) == 1, WITHIN_S, lambda: of_two.log[-3000:])
    shop.edit(replicas=0)
    wait_until(lambda: shop.groups() == [], WITHIN_S, lambda: of_two.log[-3000:])
    assert of_two.page("/health")

    shop.core.create_namespace({"metadata": {"name": OTHER}})
    shop.core.create_namespaced_secret(OTHER, login)
    grant(server, OTHER)
    other = Shop(server, OTHER)
    other.create()
    wait_until(lambda: len(other.groups()) == 1, WITHIN_S, lambda: of_two.log[-3000:])
    assert refused(of_two) == 0
    assert of_two.stop() == 0
