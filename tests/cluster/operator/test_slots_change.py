"""An edit of kvSlots on a real API server and a real pool, in which the test does what gateways and groups would."""

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
    with FakeNodes(server, {"slots": {}}) as nodes:
        yield nodes


def slots(shop: Shop) -> list[str]:
    """Return the slots that the schedulers get."""
    found = (each.spec.template.spec.containers[0].args for each in shop.schedulers())
    return [args[args.index("--slots") + 1] for args in found]


def test_fewer_slots_wait_for_a_larger_request_and_more_are_promised_when_all_groups_have_them(
    shop: Shop, redis_login: dict[str, str], tmp_path: Path
) -> None:
    pool = PoolClient(redis_login, shop.namespace, tmp_path)
    shop.create(scheduler={"kvSlots": 1024})
    shop.wait_for("Ready", "True")
    pool.form("r1", shop.generations()[0], slots=1024)
    pool.submit("larger", "r1", need=1000)

    shop.edit(scheduler={"kvSlots": 512})
    shop.wait_for("Ready", "True", "SlotsAreNeeded")
    wait_until(lambda: pool.stats.promised_slots == 512, WITHIN_S, lambda: str(pool.stats))
    assert slots(shop) == ["1024"]
    pool.cancel("larger")
    wait_until(lambda: slots(shop) == ["512"], WITHIN_S, lambda: str(shop.status()))
    shop.wait_for("Ready", "True", "Serving")

    shop.edit(scheduler={"kvSlots": 2048})
    wait_until(lambda: slots(shop) == ["2048"], WITHIN_S, lambda: str(shop.status()))

    def is_promised() -> bool:
        pool.serve("r1", 2048)
        return pool.stats.promised_slots == 2048

    wait_until(is_promised, WITHIN_S, lambda: str(pool.stats))
