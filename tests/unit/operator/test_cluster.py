"""The operator's calls to the API server, and its handling of the answers."""

import pytest

from orca.operator.cluster.api_calls import ApiServerError
from support.operator.fake_api_server import fake_api_server

POD = "/api/v1/namespaces/ns/pods/shop-0"


def test_only_the_object_that_was_seen_is_deleted() -> None:
    with fake_api_server() as (fake, cluster):
        cluster.delete("Pod", "ns", "shop-0", "uid-of-old", is_forced=True)
    [(method, path, body)] = fake.said
    assert body is not None
    assert (method, path) == ("DELETE", POD)
    assert (body["preconditions"], body["gracePeriodSeconds"]) == ({"uid": "uid-of-old"}, 0)


@pytest.mark.parametrize("status", [404, 409])
def test_an_object_that_is_gone_or_was_replaced_needs_no_delete(status: int) -> None:
    with fake_api_server() as (fake, cluster):
        fake.refuses["DELETE", POD] = status, "so it is"
        cluster.delete("Pod", "ns", "shop-0", "uid-of-old")
    assert len(fake.said) == 1


def test_a_refused_delete_is_reported_with_the_servers_message() -> None:
    with fake_api_server() as (fake, cluster):
        fake.refuses["DELETE", POD] = 403, "so it is"
        with pytest.raises(ApiServerError, match="so it is") as refused:
            cluster.delete("Pod", "ns", "shop-0", "uid-of-old")
    assert (refused.value.status, refused.value.is_answer) == (403, True)


def test_an_object_that_exists_is_not_created_again() -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "ns"}, "stringData": {}}
    with fake_api_server() as (_, cluster):
        first = cluster.create({**secret, "stringData": {"a": "1"}})
        assert cluster.create({**secret, "stringData": {"a": "2"}}) == first
