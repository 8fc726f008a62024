"""Fields that change on a living resource, and change back: the operator comes to rest both times, at the end where it
began."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.operator.api_server import ApiServer
from support.operator.end_state import State, difference
from support.operator.fake_nodes import FakeNodes
from support.operator.fields import Field, fields, valid
from support.operator.journeys import OF_THE_TEST, Journey, JourneyRunner, creation, journey_runner
from support.operator.operator_runs import prepare
from support.operator.recording_proxy import Moment
from support.operator.shop import WITHIN_S
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SAMPLE = ("worker.sharedMemoryMiB", "scheduler.kvSlots", "gateway.limits.callsPerKey", "pool.retentionSeconds")
"""One of each role."""


@pytest.fixture(scope="module")
def resource(
    server: ApiServer, redis_login: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JourneyRunner]:
    prepare()
    folder = tmp_path_factory.mktemp("lives")
    with FakeNodes(server, {"one": {}}), journey_runner(server, folder, "there-and-back", redis_login) as one:
        # Slots wait for what a pool says.
        settle(one, creation(pool=OF_THE_TEST))
        yield one


@pytest.mark.parametrize("field", [each for each in fields() if each.name in SAMPLE], ids=lambda field: field.name)
def test_a_field_takes_effect_and_can_be_reverted(resource: JourneyRunner, field: Field) -> None:
    start = children(resource)
    there = settle(resource, change(field, valid(field)[0]))
    assert difference(start, there), f"{field.name} changes nothing"
    back = settle(resource, change(field, None))
    assert not difference(start, back), difference(start, back)


def change(field: Field, value: Any) -> Journey:
    """Args: value: None takes the field away."""
    spec = {role: fields for role, fields in field.spec(value).items() if role == field.path[0]}
    return Journey(f"{field.name} = {value}", lambda shop: shop.edit(**spec))


def settle(one: JourneyRunner, journey: Journey) -> State:
    one.make(journey, None, Moment.BEFORE)
    wait_until(one.is_at_rest, WITHIN_S, lambda: f"{journey.name}: {one.state()}")
    one.shop.wait_for("Accepted", "True", "Valid")
    return children(one)


def children(one: JourneyRunner) -> State:
    """The resource itself has another generation each time."""
    return {name: each for name, each in one.state().items() if name != "OrcaDeployment"}
