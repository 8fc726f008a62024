"""Several operators as processes, one Lease, a real API server: one of them acts."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from kubernetes import client

from support.operator.api_server import ApiServer
from support.operator.recording_proxy import Moment, RecordingProxy
from support.operator.shop import WITHIN_S, OperatorProcess, Shop
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LONG_S = 600
"""Nobody waits so long: who takes the Lease in time has not waited for its end."""
SHORT_S = 12
"""Its holder may be late by eight seconds, on a machine that is busy."""

Start = Callable[..., OperatorProcess]


@pytest.fixture
def start(server: ApiServer, shop: Shop, tmp_path: Path) -> Iterator[Start]:
    """Gets an identity, the Lease's seconds and, where it is not the straight one, the way to the API server."""
    with ExitStack() as ends:

        def begin(identity: str, seconds: int, kubeconfig: Path | None = None) -> OperatorProcess:
            where = ("--namespaces", shop.namespace, "--lease-namespace", shop.namespace)
            lease = ("--lease", "operator", "--lease-identity", identity, "--lease-seconds", str(seconds))
            log = tmp_path / f"{len(list(tmp_path.iterdir()))}-{identity}.log"
            operator = OperatorProcess(server, log, *where, *lease, kubeconfig=kubeconfig)
            operator.start()
            ends.callback(suppress_gone, operator.kill)
            wait_until(lambda: answers(operator), WITHIN_S, lambda: operator.log)
            return operator

        yield begin


def suppress_gone(kill: Callable[[], None]) -> None:
    with suppress(ProcessLookupError):
        kill()


def answers(operator: OperatorProcess) -> bool:
    try:
        return bool(operator.page("/health"))
    except OSError:
        return False


def leads(operator: OperatorProcess) -> bool:
    return operator.metric("orca_operator_is_leader") == 1


def wait_to_lead(operator: OperatorProcess) -> float:
    """Returns: seconds."""
    began_s = time.monotonic()
    wait_until(lambda: leads(operator), WITHIN_S, lambda: operator.log)
    return time.monotonic() - began_s


def wait_to_wait(operator: OperatorProcess) -> None:
    wait_until(lambda: "waits for the Lease" in operator.log, WITHIN_S, lambda: operator.log)


def holder(server: ApiServer, shop: Shop) -> str | None:
    lease = client.CoordinationV1Api(server.api()).read_namespaced_lease("operator", shop.namespace)
    return str(lease.spec.holder_identity) if lease.spec.holder_identity else None


def test_one_operator_acts_and_the_standby_stays_healthy(shop: Shop, server: ApiServer, start: Start) -> None:
    first = start("first", LONG_S)
    wait_to_lead(first)
    second = start("second", LONG_S)
    wait_to_wait(second)
    shop.create()
    shop.wait_for("SchedulerReady", "False")
    assert (leads(first), leads(second)) == (True, False)
    assert answers(second)
    assert second.reconciles() == 0
    assert holder(server, shop) == "first"


def test_an_operator_releases_the_lease_on_sigterm(shop: Shop, server: ApiServer, start: Start) -> None:
    first = start("first", LONG_S)
    wait_to_lead(first)
    assert first.stop() == 0
    assert holder(server, shop) is None
    second = start("second", LONG_S)
    wait_to_lead(second)
    assert second.stop() == 0


def test_a_standby_that_ends_does_not_change_the_lease(shop: Shop, server: ApiServer, start: Start) -> None:
    wait_to_lead(start("first", LONG_S))
    second = start("second", LONG_S)
    wait_to_wait(second)
    assert second.stop() == 0
    assert holder(server, shop) == "first"


def test_a_restarted_container_keeps_the_lease_of_its_pod(start: Start) -> None:
    first = start("first", LONG_S)
    wait_to_lead(first)
    first.kill()
    wait_to_lead(start("first", LONG_S))


def test_the_lease_of_a_killed_operator_is_taken_after_it_expires(shop: Shop, start: Start) -> None:
    first = start("first", SHORT_S)
    wait_to_lead(first)
    second = start("second", SHORT_S)
    wait_to_wait(second)
    first.kill()
    assert not leads(second)
    shop.create()
    wait_to_lead(second)
    shop.wait_for("SchedulerReady", "False")


def test_an_operator_that_was_frozen_past_its_lease_writes_nothing_more(
    shop: Shop, server: ApiServer, start: Start, tmp_path: Path
) -> None:
    with RecordingProxy(server) as proxy:
        first = start("first", SHORT_S, server.write_kubeconfig(tmp_path / "kubeconfig", proxy.url))
        wait_to_lead(first)

        def freeze() -> bool:
            first.send(signal.SIGSTOP)
            return True

        # It has planned some ten objects by then, and written one.
        proxy.begin(("PATCH serviceaccounts/shop", Moment.AFTER, freeze))
        shop.create()
        wait_until(lambda: proxy.record.struck is not None, WITHIN_S, lambda: first.log)
        second = start("second", SHORT_S)
        wait_to_lead(second)
        shop.wait_for("SchedulerReady", "False")
        proxy.begin()
        first.send(signal.SIGCONT)
        assert first.wait(60) == 1, first.log
        assert [str(call) for call in proxy.record.writes if "leases/" not in call.path] == []
        assert leads(second)
