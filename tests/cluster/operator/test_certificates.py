"""The Secret of certificates on a real API server: renewed under groups that run, mended, kept and found again."""

import base64
import time

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from orca.operator.cluster import credentials
from orca.operator.domain.resource import Json
from support.operator.shop import WITHIN_S, OperatorProcess, Shop
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("operator"), pytest.mark.timeout(400)]

NAME = "shop-certificates"
KEYS = {"ca.crt", "ca.key", "tls.crt", "tls.key"}


def data(shop: Shop) -> Json:
    """Return the data of the Secret; empty when there is none."""
    found = shop.core.list_namespaced_secret(shop.namespace, field_selector=f"metadata.name={NAME}").items
    return dict(found[0].data) if found else {}


def versions(shop: Shop) -> dict[str, int]:
    """Generations of what runs the groups, by name."""
    found = shop.apps.list_namespaced_stateful_set(shop.namespace).items
    return {each.metadata.name: each.metadata.generation for each in found}


def wait_for_groups(shop: Shop) -> None:
    """A pool is one of the test's, so two of them are one group."""
    wait_until(lambda: len(versions(shop)) == 2, WITHIN_S, lambda: str(shop.status()))


def test_a_certificate_near_its_expiry_is_renewed_by_its_ca_without_changing_groups(
    shop: Shop, operator: OperatorProcess
) -> None:
    shop.create()
    wait_for_groups(shop)
    made, before = data(shop), versions(shop)
    assert made.keys() == KEYS
    signer = load_pem_private_key(base64.b64decode(made["ca.key"]), password=None)
    old = credentials.issue("shop", f"shop.{shop.namespace}.svc", signer, time.time() - 80 * 86_400)  # type: ignore[arg-type]
    shop.core.patch_namespaced_secret(NAME, shop.namespace, {"stringData": old})
    put = {key: base64.b64encode(text.encode()).decode() for key, text in old.items()}
    wait_until(lambda: data(shop)["tls.crt"] not in (made["tls.crt"], put["tls.crt"]), WITHIN_S, lambda: operator.log)
    assert data(shop)["ca.key"] == made["ca.key"]
    assert versions(shop) == before
    assert [line.count("it expires on") for line in operator.log.splitlines() if "issue (" in line] == [0, 1]


def test_removed_keys_and_a_deleted_secret_are_restored(shop: Shop) -> None:
    shop.create()
    wait_until(lambda: data(shop), WITHIN_S)
    made = data(shop)
    shop.core.patch_namespaced_secret(NAME, shop.namespace, {"data": {"tls.key": None}})
    wait_until(lambda: data(shop).keys() == KEYS, WITHIN_S)
    assert data(shop)["ca.key"] == made["ca.key"]
    shop.core.delete_namespaced_secret(NAME, shop.namespace)
    wait_until(lambda: data(shop).keys() == KEYS, WITHIN_S)
    assert data(shop)["ca.key"] != made["ca.key"]


def test_a_resource_that_is_created_again_uses_the_retained_secret(shop: Shop) -> None:
    shop.create()
    wait_for_groups(shop)
    made = data(shop)
    shop.delete()
    wait_until(lambda: not versions(shop), WITHIN_S, lambda: str(versions(shop)))
    assert data(shop) == made
    shop.create()
    wait_for_groups(shop)
    assert data(shop) == made
    shop.wait_for("Accepted", "True", "Valid")


def test_a_missing_user_provided_secret_is_reported_and_none_is_issued(shop: Shop) -> None:
    shop.create(certificates={"secretName": "team"})
    shop.wait_for("WorkersReady", "False", "SecretMissing")
    assert not data(shop)
    files = credentials.issue("shop", f"shop.{shop.namespace}.svc", None, time.time())
    body = {"metadata": {"name": "team"}, "stringData": {key: files[key] for key in ("ca.crt", "tls.crt", "tls.key")}}
    shop.core.create_namespaced_secret(shop.namespace, body)
    # There may be no node, which is another story.
    wait_until(lambda: shop.condition("WorkersReady")[1] not in ("", "SecretMissing"), WITHIN_S)
