"""All resources are reconciled at intervals, and a lost node is seen soon, also without watch events."""

import pytest

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
