"""Checks of a plan on a real API server and a real pool, in which the test leaves what the Jobs would find."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orca.core.job_files import SHORTFALL_FILE
from orca.operator.domain import names
from orca.operator.domain.resource import Json
from orca.operator.domain.slo.keys import plan_key, profile_key
from support.operator.api_server import ApiServer
from support.operator.deployments import deployment
from support.operator.fake_nodes import NOW, FakeNodes
from support.operator.planned_files import check_body, plan_body, profile_body, report, schedule
from support.operator.pool_client import PoolClient
from support.operator.shop import WITHIN_S, WORKER_IMAGE, OperatorProcess, Shop
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nodes"), pytest.mark.timeout(400)]

GOAL: Json = {"latencyMs": 8000, "devices": 4, "workload": {"lengths": "8/8"}}
ENDED: Json = {
    "phase": "Succeeded",
    "state": {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": NOW, "finishedAt": NOW}},
}


@pytest.fixture(scope="module")
def nodes(server: ApiServer) -> Iterator[FakeNodes]:
    """Start nodes on which checks end at once."""
    with FakeNodes(server, {"checks": {}}) as nodes:
        nodes.says = lambda pod: ENDED if pod.metadata.labels.get(names.ROLE_LABEL) == names.FOLLOW else None
        yield nodes


@pytest.fixture
def often(server: ApiServer, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator for which a check is due every second."""
    process = OperatorProcess(server, tmp_path / "operator.log", "--slo-check-seconds", "1")
    process.start()
    yield process
    process.kill()


def batch_size(shop: Shop) -> int:
    """Return the bound that the wanted schedulers read."""
    data = shop.core.read_namespaced_config_map("shop-schedule", shop.namespace).data
    return int(json.loads(list(data.values())[-1])["max_batch_size"])


def test_checks_are_taken_one_after_another_by_operators_that_die(
    shop: Shop, often: OperatorProcess, redis_login: dict[str, str], tmp_path: Path
) -> None:
    wanted = deployment(model={"uri": "file:///m"}, pool={"external": {"urlSecret": {"name": "redis"}}}, slo=GOAL)
    key = plan_key(wanted, WORKER_IMAGE)
    pool = PoolClient(redis_login, shop.namespace, tmp_path)

    def leave(name: str, body: bytes) -> None:
        pool.do(lambda one: one.keep_result(name, body))

    def record() -> dict[str, Any]:
        found: dict[str, Any] = shop.core.read_namespaced_config_map(names.follow("shop", key), shop.namespace).data
        return found

    def is_in_force(size: int, checks: int) -> bool:
        return batch_size(shop) == size and shop.status().get("plan", {}).get("checks") == checks

    leave(names.profile("shop", profile_key(wanted, WORKER_IMAGE)), profile_body())
    leave(names.plan("shop", key), plan_body())
    smaller = schedule(max_batch_size=5, max_batch_tokens=21)
    missed = check_body(smaller, shortfall="no schedule meets the goal", report_text=report(is_new=True))
    leave(names.check("shop", key, 1), missed)
    shop.create(slo=GOAL)
    shop.wait_for("PlanReady", "True", "Planned")
    wait_until(lambda: is_in_force(5, 1), WITHIN_S, lambda: str(shop.status()))
    shop.wait_for("SloMet", "False", "Infeasible")
    assert record()[SHORTFALL_FILE] == "no schedule meets the goal"

    often.kill()
    leave(names.check("shop", key, 2), check_body())
    often.start()
    wait_until(lambda: is_in_force(9, 2), WITHIN_S, lambda: str(shop.status()))
    shop.wait_for("SloMet", "Unknown", "Measuring")
    assert SHORTFALL_FILE not in record()
    assert shop.status()["plan"]["predicted"]["latencyMs"] == 7400

    pool.form("r1", shop.generations()[0])
    wait_until(lambda: json.loads(record()["following.json"])["since_ms"] is not None, WITHIN_S, lambda: str(record()))

    shop.edit(slo=None)
    wait_until(
        lambda: (
            not shop.core.list_namespaced_config_map(
                shop.namespace, label_selector=f"{names.ROLE_LABEL}={names.FOLLOW}"
            ).items
        ),
        WITHIN_S,
        lambda: often.log_about(shop.namespace),
    )
