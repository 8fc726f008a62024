"""The key of the CA is lost: what it has signed serves on, and another CA signs when all parts trust it."""

import base64
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from orca.operator.cluster import credentials
from orca.operator.domain import certificates
from orca.operator.domain.actions import IssueCertificate
from orca.operator.domain.certificates import CA, CA_KEY, CERTIFICATE, KEY, KNOWN_AFTER_S
from support.operator.clusters import BORN_S
from support.operator.deployments import deployment
from support.operator.handshakes import Files, ask, issue, secret, shown

DAY_S = 86_400.0
NOW_S = BORN_S
SHOP = deployment()


def due(files: Files, now_s: float) -> IssueCertificate | None:
    return certificates.due_of(SHOP, secret(files), now_s)


def with_another_ca_key(files: Files) -> Files:
    return files | {CA_KEY: issue()[CA_KEY]}


def with_a_key_of_another_kind(files: Files) -> Files:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return files | {CA_KEY: key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()}


WITHOUT_THE_CA_KEY = [
    lambda files: {key: text for key, text in files.items() if key != CA_KEY},
    lambda files: files | {CA_KEY: "spoiled"},
    with_a_key_of_another_kind,
    with_another_ca_key,
]


@pytest.mark.parametrize("lose", WITHOUT_THE_CA_KEY)
def test_a_lost_ca_key_replaces_nothing_before_its_time(lose: Callable[[Files], Files]) -> None:
    files = lose(issue())
    assert [due(files, NOW_S + days * DAY_S) for days in (0, 59.9)] == [None] * 2
    assert due(files, NOW_S + 60 * DAY_S) is not None


def carried_out(action: IssueCertificate | None, at_s: float) -> Files:
    assert action is not None
    data = credentials.certificates_secret(SHOP, action, at_s)["data"]
    return {key: base64.b64decode(text).decode() for key, text in data.items()}


@pytest.mark.parametrize("lose", WITHOUT_THE_CA_KEY)
async def test_a_new_ca_is_distributed_before_it_signs(lose: Callable[[Files], Files], tmp_path: Path) -> None:
    now_s = time.time()
    first = lose(issue(issued_s=now_s - 61 * DAY_S))
    known = carried_out(due(first, now_s), now_s)
    assert [known[key] for key in (CERTIFICATE, KEY)] == [first[key] for key in (CERTIFICATE, KEY)]
    assert due(known, now_s + KNOWN_AFTER_S - 1) is None
    later_s = now_s + KNOWN_AFTER_S
    signed = carried_out(due(known, later_s), later_s)
    assert (signed[CA_KEY], signed[KEY] != first[KEY]) == (known[CA_KEY], True)
    assert due(signed, later_s) is None
    for files in ([first, known], [known, signed]):
        for server, client in product([shown(each, tmp_path) for each in files], repeat=2):
            assert await ask(server, client) == "here"
    last = carried_out(due(signed, later_s + 60 * DAY_S), later_s + 60 * DAY_S)
    assert last[CA].count("BEGIN") == 1


def test_an_expired_certificate_does_not_wait_until_a_new_ca_is_distributed() -> None:
    files = with_another_ca_key(issue())
    made = carried_out(due(files, NOW_S + 91 * DAY_S), NOW_S + 91 * DAY_S)
    assert (made[KEY] != files[KEY], made[CA_KEY]) == (True, files[CA_KEY])


def test_a_new_ca_whose_key_is_lost_too_is_replaced_by_a_third() -> None:
    now_s = NOW_S + 61 * DAY_S
    first = with_another_ca_key(issue())
    lost = with_another_ca_key(carried_out(due(first, now_s), now_s))
    third = carried_out(due(lost, now_s), now_s)
    assert third[CA].endswith(first[CA])
    assert third[CA].count("BEGIN") == 2


def test_a_comment_in_another_encoding_does_not_stop_every_reconcile() -> None:
    there = secret({key: text for key, text in issue().items() if key != CA_KEY})
    content = base64.b64decode(there["data"][CERTIFICATE])
    there["data"][CERTIFICATE] = base64.b64encode("friendlyName: Müller\n".encode("latin-1") + content).decode()
    found = certificates.due_of(SHOP, there, NOW_S + 60 * DAY_S)
    assert found is not None
    assert found.kept[CERTIFICATE].endswith(content.decode())
