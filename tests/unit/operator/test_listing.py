"""When all resources are looked at, and how soon a lost node is seen, whatever is heard of either."""

import pytest

from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.cluster.api_server import Cluster
from orca.operator.cluster.watching import ResourceLists
from support.operator.paper_api import PaperApi, paper_api

SHOP = {"metadata": {"namespace": "ns", "name": "shop", "uid": "uid-1"}}


def there_is(paper: PaperApi, *, is_lost: bool) -> None:
    """One resource, and one node."""
    paper.objects["/apis/orca-serving.io/v1alpha1/orcadeployments"] = {"items": [SHOP]}
    conditions = [{"type": "Ready", "status": "Unknown" if is_lost else "True"}]
    paper.objects["/api/v1/nodes"] = {"items": [{"metadata": {"name": "a"}, "status": {"conditions": conditions}}]}


class Rare(ResourceLists):
    """Looks at all once an hour, by a clock of the test's."""

    def __init__(self, cluster: Cluster) -> None:
        self.now_s = 0.0
        super().__init__(cluster, (), resync_s=3600, clock=lambda: self.now_s)


def test_all_are_looked_at_once_in_the_time_that_was_given() -> None:
    with paper_api() as (paper, cluster):
        there_is(paper, is_lost=False)
        listing = Rare(cluster)
        assert listing.list().due == (("ns", "shop"),)
        listing.now_s = 3599
        listed = listing.list()
        assert (listed.due, listed.uids) == ((), {"uid-1"})
        listing.now_s = 3600
        assert listing.list().due == (("ns", "shop"),)


def test_a_node_that_is_lost_or_back_is_known_with_the_next_list_and_all_are_looked_at() -> None:
    with paper_api() as (paper, cluster):
        listing = Rare(cluster)
        for is_lost, nodes in [(False, set()), (True, {"a"}), (False, set())]:
            there_is(paper, is_lost=is_lost)
            assert listing.list().due == (("ns", "shop"),)
            assert listing.lost_nodes == nodes
            assert listing.list().due == ()


@pytest.mark.parametrize(("resync_s", "every_s"), [(3600, 30), (45, 22.5), (30, 30), (5, 5)])
def test_lists_are_half_a_minute_apart_at_most_and_one_comes_when_looks_are_due(
    resync_s: float, every_s: float
) -> None:
    with paper_api() as (_, cluster):
        assert ResourceLists(cluster, (), resync_s=resync_s, clock=lambda: 0.0).every_s == every_s


A, B = (f"/apis/orca-serving.io/v1alpha1/namespaces/{name}/orcadeployments" for name in "ab")


def shop_in(namespace: str) -> dict[str, object]:
    return {"items": [{"metadata": {"namespace": namespace, "name": "shop", "uid": f"uid-{namespace}"}}]}


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_namespace_that_is_refused_leaves_the_others_served(status: int) -> None:
    with paper_api() as (paper, cluster):
        paper.objects |= {A: shop_in("a"), B: shop_in("b")}
        listing = ResourceLists(cluster, ("a", "b"), resync_s=3600, clock=lambda: 0.0)
        assert listing.list().served == ("a", "b")
        paper.refuses["GET", B] = status, "so it is"
        listed = listing.list()
        assert (listed.served, listed.uids, listed.due) == (("a",), {"uid-a"}, ())
        assert "so it is" in listed.refused["b"]


def test_a_namespace_that_comes_is_looked_at_with_the_next_list() -> None:
    with paper_api() as (paper, cluster):
        paper.objects |= {A: shop_in("a"), B: shop_in("b")}
        paper.refuses["GET", B] = 403, "so it is"
        listing = ResourceLists(cluster, ("a", "b"), resync_s=3600, clock=lambda: 0.0)
        listing.list()
        del paper.refuses["GET", B]
        assert listing.list().due == (("a", "shop"), ("b", "shop"))


def test_no_namespace_at_all_is_an_answer_and_not_an_api_server_that_is_away() -> None:
    with paper_api() as (paper, cluster):
        paper.refuses["GET", A] = 403, "so it is"
        listed = ResourceLists(cluster, ("a",), resync_s=3600, clock=lambda: 0.0).list()
        assert (listed.served, listed.due, set(listed.refused)) == ((), (), {"a"})


@pytest.mark.parametrize("status", [401, 503])
def test_credentials_that_have_run_out_and_an_api_server_that_fails_are_everybodys_trouble(status: int) -> None:
    with paper_api() as (paper, cluster):
        for path in (A, B):
            paper.refuses["GET", path] = status, "so it is"
        with pytest.raises(ApiServerError, match="so it is"):
            ResourceLists(cluster, ("a", "b"), resync_s=3600, clock=lambda: 0.0).list()
