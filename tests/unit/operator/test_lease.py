"""Operators take a Lease by its rules, and no two of them ever write at the same time."""

import asyncio
import random
import time
from dataclasses import replace

import pytest

from orca.core.domain.errors import SettingError
from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.cluster.leadership import Leadership
from orca.operator.plan.lease import holder, may_take, released, taken
from orca.operator.settings import OperatorSettings, parse_settings
from support.operator.fake_api_server import fake_api_server
from support.operator.lease_simulation import (
    DURATION_S,
    OPERATORS,
    FakeLeases,
    LeaseSimulation,
    NoFaults,
    lease_object,
    terms,
)

ME = terms("me")
IMAGES = [word for role in ("gateway", "scheduler", "worker", "pool", "fetch") for word in (f"--image-{role}", "i:1")]


@pytest.mark.parametrize("unchanged_s", [0, 1e9])
def test_a_free_lease_and_the_operators_own_lease_are_taken_at_once(unchanged_s: float) -> None:
    for lease in (None, lease_object("me"), released(lease_object("other"))):
        assert may_take(lease, ME, unchanged_s=unchanged_s)


def test_another_operators_lease_is_taken_after_it_has_not_changed_for_its_duration() -> None:
    lease = lease_object("other", leaseDurationSeconds=30)
    assert ME.duration_s < 30
    assert not may_take(lease, ME, unchanged_s=29.9)
    assert may_take(lease, ME, unchanged_s=30)


def test_a_lease_without_a_duration_lasts_as_long_as_the_readers_own() -> None:
    lease = {"metadata": {}, "spec": {"holderIdentity": "other"}}
    assert not may_take(lease, ME, unchanged_s=ME.duration_s - 0.1)
    assert may_take(lease, ME, unchanged_s=ME.duration_s)


def test_a_renewal_keeps_the_count_of_transitions() -> None:
    first = taken(None, ME, "noon")
    assert first["metadata"] == {"name": ME.name, "namespace": ME.namespace}
    assert (first["spec"]["acquireTime"], first["spec"]["leaseTransitions"]) == ("noon", 0)
    renewed = taken(first, ME, "one")
    assert [renewed["spec"][key] for key in ("acquireTime", "renewTime", "leaseTransitions")] == ["noon", "one", 0]
    other = taken(renewed, terms("other"), "two")
    assert [other["spec"][key] for key in ("acquireTime", "renewTime", "leaseTransitions")] == ["two", "two", 1]
    assert holder(other) == "other"
    assert holder(released(other)) is None


def test_a_lease_is_written_with_the_resource_version_that_was_read() -> None:
    lease = lease_object("other", version="7")
    assert taken(lease, ME, "noon")["metadata"] == lease["metadata"]
    assert released(lease)["metadata"]["resourceVersion"] == "7"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(20))
def test_while_an_operator_may_write_no_other_holds_the_lease(seed: int) -> None:
    """Operators freeze in the middle of calls, lose answers, are killed and come back, or end in order."""
    simulation = LeaseSimulation(random.Random(seed))
    for _ in range(100):
        simulation.step()
    assert simulation.overlaps == []


def test_simulated_operators_take_over_lose_and_release_the_lease() -> None:
    """The simulations above are not safe only because nothing happens in them."""
    simulations = [LeaseSimulation(random.Random(seed)) for seed in range(4)]
    for simulation in simulations:
        for _ in range(100):
            simulation.step()
    for counted in ("taken over", "lost", "released", "killed"):
        assert sum(simulation.counts[counted] for simulation in simulations) > 20, counted
    assert {name for simulation in simulations for name in simulation.holders} == set(OPERATORS)


def test_a_lease_that_is_edited_to_another_holder_is_lost_at_once() -> None:
    simulation = LeaseSimulation(NoFaults())
    mine = simulation.begin("a")
    mine.renew()
    assert mine.write_s() == DURATION_S
    simulation.stored = lease_object("b", version="by hand")
    mine.renew()
    assert (mine.is_lost, mine.write_s()) == (True, 0)
    simulation.stored = None
    mine.renew()
    assert simulation.stored is None


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="the system has no clock that counts suspended time")
def test_an_operator_whose_machine_was_suspended_has_lost_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    leadership = Leadership(FakeLeases(LeaseSimulation(NoFaults())), ME)
    leadership.renew()
    assert leadership.is_held
    read, suspended_s = time.clock_gettime, 60.0
    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: read(clock) + (suspended_s if clock == time.CLOCK_BOOTTIME else 0.0)
    )
    assert (leadership.is_lost, leadership.write_s()) == (True, 0.0)


async def test_an_operator_that_cannot_renew_its_lease_loses_it() -> None:
    simulation = LeaseSimulation(NoFaults())
    leases = FakeLeases(simulation)
    leadership = Leadership(leases, replace(ME, duration_s=1))
    holding = asyncio.create_task(leadership.hold())
    await asyncio.wait_for(leadership.taken.wait(), 20)
    leases.is_away = True
    await asyncio.wait_for(holding, 20)
    assert leadership.is_lost


def test_without_the_lease_an_operator_reads_everything_and_writes_nothing() -> None:
    with fake_api_server(write_s=lambda: 0) as (fake, cluster):
        fake.objects["/api/v1/namespaces/ns/secrets/s"] = {"metadata": {"name": "s"}}
        assert cluster.secret("ns", "s") is not None
        with pytest.raises(ApiServerError, match="does not hold the Lease") as refused:
            cluster.write_status("ns", "shop", {})
    assert not refused.value.is_answer
    assert {method for method, _, _ in fake.said} == {"GET"}


LEASED = ["--lease", "orca", "--lease-namespace", "system", "--lease-identity", "pod-1"]


def settings(*words: str) -> OperatorSettings:
    return parse_settings([*IMAGES, *words], {})


def test_no_lease_is_used_unless_it_is_named() -> None:
    assert settings().lease_terms is None


def test_a_named_lease_lasts_as_long_as_those_of_kubernetes() -> None:
    terms = settings(*LEASED).lease_terms
    assert terms is not None
    assert (terms.namespace, terms.name, terms.identity) == ("system", "orca", "pod-1")
    assert (terms.duration_s, terms.writing_s, terms.retry_s) == (15, 10, 2)
    assert terms.call_s * 2 + terms.retry_s < terms.writing_s


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (LEASED[:4], "--lease-identity"),
        (LEASED[:2] + LEASED[4:], "--lease-namespace"),
        (["--lease", "No Name", *LEASED[2:]], "--lease"),
        ([*LEASED, "--lease-seconds", "2"], "--lease-seconds"),
        ([*LEASED, "--lease-seconds", "soon"], "--lease-seconds"),
    ],
)
def test_an_invalid_lease_setting_stops_the_start_with_its_name(words: list[str], name: str) -> None:
    with pytest.raises(SettingError, match=f"setting {name}:"):
        settings(*words)
