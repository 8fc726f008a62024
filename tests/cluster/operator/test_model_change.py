"""A change of the model on a real API server and a real pool, in which the test does what gateways and groups would."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.operator.api_server import ApiServer
from support.operator.fake_nodes import FakeNodes
from support.operator.pool_client import PoolClient
from support.operator.shop import WITHIN_S, Shop
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("operator", "nodes"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def nodes(server: ApiServer) -> Iterator[FakeNodes]:
    with FakeNodes(server, {"changing": {}}) as nodes:
        yield nodes


def others(shop: Shop) -> str | None:
    """Return the models that the gateways get beside their own model."""
    deployment = shop.apps.read_namespaced_deployment("shop-gateway", shop.namespace)
    args = deployment.spec.template.spec.containers[0].args
    return dict(zip(args[1::2], args[2::2], strict=True)).get("--other-models")


def test_the_old_model_is_kept_for_its_last_request_and_its_readers(
    shop: Shop, redis_login: dict[str, str], tmp_path: Path
) -> None:
    pool = PoolClient(redis_login, shop.namespace, tmp_path)
    shop.create()
    shop.wait_for("Ready", "True")
    [old], [first] = shop.groups(), shop.generations()
    pool.form("old", first)
    pool.submit("a", "old")

    shop.edit(model={"uri": "file:///other"})
    wait_until(lambda: len(shop.generations()) == 2, WITHIN_S, lambda: str(shop.status()))
    assert others(shop) == "/m?name=m&dtype=float32"
    pool.form("new", shop.generations()[1])
    shop.wait_for("Ready", "True", "OldModelDrains")
    assert old in shop.groups()

    pool.cancel("a")
    wait_until(lambda: old not in shop.groups(), WITHIN_S, lambda: str(shop.status()))
    assert others(shop) is not None

    def is_forgotten() -> bool:
        pool.do(lambda each: each.sweep())
        return others(shop) is None

    wait_until(is_forgotten, WITHIN_S)
    shop.wait_for("Ready", "True", "Serving")
