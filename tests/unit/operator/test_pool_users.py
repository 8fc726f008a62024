"""The rights in a managed pool's Redis follow the release: its Secret is older than the parts of an upgrade."""

import base64
import hashlib
import time

from orca.operator.cluster import credentials
from orca.operator.cluster.api_server import Cluster
from orca.operator.domain import names
from orca.operator.domain.api_refusals import Refusals
from orca.operator.domain.resource import Json
from orca.operator.plan.children import finish
from orca.operator.reconcile import observe, reconcile
from support.operator.clusters import RELEASE
from support.operator.deployments import deployment
from support.operator.fake_api_server import FakeApiServer, fake_api_server

SHOP = deployment()
SECRET = "/api/v1/namespaces/ns/secrets/shop-pool"
REDIS = "/apis/apps/v1/namespaces/ns/statefulsets/shop-pool"


def drawn() -> Json:
    """The pool's Secret as this release makes it, and the API server hands it over."""
    made = finish(SHOP, credentials.pool_secret(SHOP))
    return {**made, "metadata": made["metadata"] | {"uid": "uid-9"}}


def text(secret: Json, key: str = "users.acl") -> str:
    return base64.b64decode(secret["data"][key]).decode()


def with_text(secret: Json, **texts: str) -> Json:
    written = {key.replace("_", "."): base64.b64encode(each.encode()).decode() for key, each in texts.items()}
    return {**secret, "data": secret["data"] | written}


def of_release_before(secret: Json) -> Json:
    """Return the secret of the previous release: one command less, and one that is no longer used."""
    return with_text(secret, users_acl=text(secret).replace("+zrangebyscore", "+zlexcount"))


def reconcile_once(fake: FakeApiServer, cluster: Cluster) -> list[str]:
    """Reconcile once. Returns: the written objects of the pool."""
    begin = len(fake.said)
    reconcile(cluster, observe(cluster, RELEASE, SHOP, frozenset()), {}, Refusals(time.monotonic))
    return [path for method, path, _ in fake.said[begin:] if method == "PATCH" and path in (SECRET, REDIS)]


def test_redis_gets_the_rights_that_an_upgrade_adds_and_then_restarts_once() -> None:
    with fake_api_server() as (fake, cluster):
        assert reconcile_once(fake, cluster) == [REDIS]
        new = fake.objects[SECRET]
        fake.objects[SECRET] = of_release_before(new)
        marks = fake.objects[REDIS]["spec"]["template"]["metadata"]["annotations"]
        before = marks[names.USERS_ANNOTATION]
        assert reconcile_once(fake, cluster) == [SECRET]
        assert text(fake.objects[SECRET], "password") == text(new, "password")
        assert set(text(fake.objects[SECRET]).split()) == {*text(new).split(), "+zlexcount"}
        assert reconcile_once(fake, cluster) == [REDIS]
        marks = fake.objects[REDIS]["spec"]["template"]["metadata"]["annotations"]
        assert marks[names.USERS_ANNOTATION] != before
        assert reconcile_once(fake, cluster) == []


def test_a_secret_that_cannot_be_written_leaves_redis_as_it_is() -> None:
    with fake_api_server() as (fake, cluster):
        reconcile_once(fake, cluster)
        fake.objects[SECRET] = of_release_before(fake.objects[SECRET])
        fake.refuses["PATCH", "secrets/shop-pool"] = 403, "policies forbid it"
        assert reconcile_once(fake, cluster) == reconcile_once(fake, cluster) == [SECRET]
        [told] = [each for each in fake.status("shop")["conditions"] if each["type"] == "Accepted"]
        assert "policies forbid it" in told["message"]


def test_operators_of_two_releases_keep_each_others_rights() -> None:
    older = of_release_before(drawn())
    renewed = credentials.renewed_pool_secret(SHOP, older)
    assert renewed is not None
    assert credentials.renewed_pool_secret(SHOP, with_text(older, users_acl=text(renewed))) is None
    # A line that has all words of its own the other one leaves as well.
    assert set(text(older).split()) <= set(text(renewed).split())


def test_redis_users_that_others_added_are_kept() -> None:
    secret = of_release_before(drawn())
    his = "user me on >word ~* +@read"
    renewed = credentials.renewed_pool_secret(SHOP, with_text(secret, users_acl=f"{his}\n{text(secret)}"))
    assert renewed is not None
    assert text(renewed).splitlines()[0] == his
    assert [line.split()[1] for line in text(renewed).splitlines()] == ["me", "default", "orca"]


def test_the_users_file_has_the_password_of_the_secret() -> None:
    renewed = credentials.renewed_pool_secret(SHOP, with_text(drawn(), password="another\n"))
    assert renewed is not None
    assert (text(renewed, "password"), renewed["metadata"]["uid"]) == ("another\n", "uid-9")
    assert "#" + hashlib.sha256(b"another").hexdigest() in text(renewed).split()


def test_a_secret_without_a_password_or_from_another_writer_stays_unchanged() -> None:
    secret = of_release_before(drawn())
    metadata = {key: value for key, value in secret["metadata"].items() if key != "labels"}
    for odd in ({"metadata": metadata}, {"data": {}}, {"data": {"password": "/w=="}}):
        assert credentials.renewed_pool_secret(SHOP, secret | odd) is None
