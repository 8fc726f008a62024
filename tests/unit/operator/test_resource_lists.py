"""All resources are reconciled at intervals, and a lost node is seen soon, also without watch events."""

import pytest

from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.cluster.api_server import Cluster
from orca.operator.cluster.watching import ResourceLists
from support.operator.fake_api_server import FakeApiServer, fake_api_server

SHOP = {"metadata": {"namespace": "ns", "name": "shop", "uid": "uid-1"}}


def put_objects(fake: FakeApiServer, *, is_lost: bool) -> None:
    """Put one resource and one node."""
    fake.objects["/apis/orca-serving.io/v1alpha1/orcadeployments"] = {"items": [SHOP]}
    conditions = [{"type": "Ready", "status": "Unknown" if is_lost else "True"}]
    fake.objects["/api/v1/nodes"] = {"items": [{"metadata": {"name": "a"}, "status": {"conditions": conditions}}]}


class Rare(ResourceLists):
    """Lists that resync once an hour, by a clock of the test."""

    def __init__(self, cluster: Cluster) -> None:
        self.now_s = 0.0
        super().__init__(cluster, (), resync_s=3600, clock=lambda: self.now_s)


def test_all_resources_are_reconciled_once_per_resync_interval() -> None:
    with fake_api_server() as (fake, cluster):
        put_objects(fake, is_lost=False)
        listing = Rare(cluster)
        assert listing.list().due == (("ns", "shop"),)
        listing.now_s = 3599
        listed = listing.list()
        assert (listed.due, listed.uids) == ((), {"uid-1"})
        listing.now_s = 3600
        assert listing.list().due == (("ns", "shop"),)


def test_a_lost_or_returned_node_is_seen_in_the_next_list_and_all_resources_are_reconciled() -> None:
    with fake_api_server() as (fake, cluster):
        listing = Rare(cluster)
        for is_lost, nodes in [(False, set()), (True, {"a"}), (False, set())]:
            put_objects(fake, is_lost=is_lost)
            assert listing.list().due == (("ns", "shop"),)
            assert listing.lost_nodes == nodes
            assert listing.list().due == ()


@pytest.mark.parametrize(("resync_s", "every_s"), [(3600, 30), (45, 22.5), (30, 30), (5, 5)])
def test_lists_are_at_most_half_a_minute_apart_and_one_comes_when_a_resync_is_due(
    resync_s: float, every_s: float
) -> None:
    with fake_api_server() as (_, cluster):
        assert ResourceLists(cluster, (), resync_s=resync_s, clock=lambda: 0.0).every_s == every_s


A, B = (f"/apis/orca-serving.io/v1alpha1/namespaces/{name}/orcadeployments" for name in "ab")


def shop_in(namespace: str) -> dict[str, object]:
    return {"items": [{"metadata": {"namespace": namespace, "name": "shop", "uid": f"uid-{namespace}"}}]}


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_namespace_that_is_refused_leaves_the_others_served(status: int) -> None:
    with fake_api_server() as (fake, cluster):
        fake.objects |= {A: shop_in("a"), B: shop_in("b")}
        listing = ResourceLists(cluster, ("a", "b"), resync_s=3600, clock=lambda: 0.0)
        assert listing.list().served == ("a", "b")
        fake.refuses["GET", B] = status, "so it is"
        listed = listing.list()
        assert (listed.served, listed.uids, listed.due) == (("a",), {"uid-a"}, ())
        assert "so it is" in listed.refused["b"]


def test_a_namespace_that_comes_is_looked_at_with_the_next_list() -> None:
    with fake_api_server() as (fake, cluster):
        fake.objects |= {A: shop_in("a"), B: shop_in("b")}
        fake.refuses["GET", B] = 403, "so it is"
        listing = ResourceLists(cluster, ("a", "b"), resync_s=3600, clock=lambda: 0.0)
        listing.list()
        del fake.refuses["GET", B]
        assert listing.list().due == (("a", "shop"), ("b", "shop"))


def test_no_namespace_at_all_is_an_answer_and_not_an_api_server_that_is_away() -> None:
    with fake_api_server() as (fake, cluster):
        fake.refuses["GET", A] = 403, "so it is"
        listed = ResourceLists(cluster, ("a",), resync_s=3600, clock=lambda: 0.0).list()
        assert (listed.served, listed.due, set(listed.refused)) == ((), (), {"a"})


@pytest.mark.parametrize("status", [401, 503])
def test_credentials_that_have_run_out_and_an_api_server_that_fails_are_everybodys_trouble(status: int) -> None:
    with fake_api_server() as (fake, cluster):
        for path in (A, B):
            fake.refuses["GET", path] = status, "so it is"
        with pytest.raises(ApiServerError, match="so it is"):
            ResourceLists(cluster, ("a", "b"), resync_s=3600, clock=lambda: 0.0).list()
