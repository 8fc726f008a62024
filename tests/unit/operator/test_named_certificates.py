"""Certificates in a Secret that the resource names: what is told of them, as early as it shows."""

import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc import aio

from orca.operator.domain import certificates
from orca.operator.domain.certificates import CA, CERTIFICATE, KEY
from orca.operator.domain.problems import Problem
from support.operator.clusters import BORN_S, observation
from support.operator.deployments import deployment
from support.operator.handshakes import Files, ask, by_some_ca, issue, secret, shown

DAY_S = 86_400.0
NAMED = deployment(certificates={"secretName": "team"})
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


def trouble(files: Files, at_s: float = BORN_S) -> Problem | None:
    return certificates.find_problem(observation(NAMED, named_certificates=secret(files), now_s=at_s))


def without_the_ca_between() -> Files:
    files = by_some_ca(has_ca_between=True)
    end = "-----END CERTIFICATE-----\n"
    return files | {CERTIFICATE: files[CERTIFICATE].split(end)[0] + end}


def pinned() -> Files:
    """Peers trust the certificate itself."""
    files = by_some_ca(begins_s=time.time())
    return files | {CA: files[CERTIFICATE]}


def with_another_ca_beside() -> Files:
    files = by_some_ca(begins_s=time.time())
    return files | {CA: issue()[CA] + files[CA]}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (by_some_ca() | {CA: "spoiled"}, "ca.crt cannot be read"),
        (by_some_ca() | {KEY: "spoiled"}, "tls.key cannot be read"),
        (by_some_ca() | {KEY: by_some_ca()[KEY]}, "tls.crt does not belong to tls.key"),
        (by_some_ca() | {CA: by_some_ca()[CA]}, "tls.crt is not signed by ca.crt"),
        (without_the_ca_between(), "tls.crt is not signed by ca.crt"),
        (by_some_ca(usages=[SERVER]), "tls.crt is not for clients by its extended key usage"),
        (by_some_ca(usages=[CLIENT]), "tls.crt is not for servers by its extended key usage"),
        (by_some_ca(begins_s=BORN_S + DAY_S), "tls.crt is not valid before 2026-01-02 at 00:00 UTC"),
    ],
)
def test_a_certificate_that_peers_would_refuse_is_reported_with_secret_key_and_reason(files: Files, said: str) -> None:
    found = trouble(files)
    assert found is not None
    assert found.reason == "CertificateUnfit"
    assert found.message.startswith(f"the Secret team: {said}")


@pytest.mark.parametrize("usages", [[SERVER], [CLIENT], [ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE]])
async def test_peers_refuse_a_certificate_not_meant_for_both_servers_and_clients(
    usages: list[x509.ObjectIdentifier], tmp_path: Path
) -> None:
    files = by_some_ca(usages=usages, begins_s=time.time())
    with pytest.raises(aio.AioRpcError):
        await ask(shown(files, tmp_path), shown(files, tmp_path))
    assert trouble(files, time.time())


@pytest.mark.parametrize(
    "files",
    [
        by_some_ca(begins_s=time.time()),
        by_some_ca(begins_s=time.time(), has_ca_between=True),
        by_some_ca(begins_s=time.time(), usages=()),
        with_another_ca_beside(),
        pinned(),
    ],
    ids=["plain", "a CA between", "no usages named", "another CA beside", "pinned"],
)
async def test_a_certificate_that_peers_accept_is_no_problem(files: Files, tmp_path: Path) -> None:
    assert await ask(shown(files, tmp_path), shown(files, tmp_path)) == "here"
    assert trouble(files, time.time()) is None


@pytest.mark.parametrize(
    ("at_day", "reason", "said"),
    [
        (24, None, ""),
        (26, "CertificateExpiring", "ca.crt in the Secret team expires on 2026-01-31 at 00:00 UTC"),
        (30, "CertificateExpired", "ca.crt in the Secret team expired on 2026-01-31 at 00:00 UTC"),
    ],
)
def test_a_ca_that_expires_before_the_certificate_it_signed_is_reported(
    at_day: int, reason: str | None, said: str
) -> None:
    found = trouble(by_some_ca(leaf_days=90, ca_days=30), BORN_S + at_day * DAY_S)
    assert (None if found is None else found.reason) == reason
    assert found is None or found.message.startswith(said)


@pytest.mark.parametrize(("life_days", "quiet_days"), [(1, 0.8), (7, 5.8), (30, 24.9), (90, 75.9), (365, 350.9)])
def test_a_certificate_of_any_lifetime_is_no_problem_while_it_may_still_be_renewed(
    life_days: float, quiet_days: float
) -> None:
    files = by_some_ca(leaf_days=life_days, ca_days=3650)
    assert trouble(files, BORN_S + quiet_days * DAY_S) is None
    found = trouble(files, BORN_S + (quiet_days + 0.15) * DAY_S)
    assert found is not None
    assert found.reason == "CertificateExpiring"
