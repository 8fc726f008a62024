"""Certificates of schedulers and stages: when they are issued, that old and new trust each other, what is told."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from grpc import aio

from orca.operator.cluster.api_server import Cluster
from orca.operator.domain import certificates, names
from orca.operator.domain.actions import IssueCertificate
from orca.operator.domain.api_refusals import Refusal, Refusals
from orca.operator.domain.certificates import CA, CA_KEY, CERTIFICATE, FILES, KEY
from orca.operator.domain.resource import Json, OrcaDeployment
from orca.operator.plan.plan import make_plan
from orca.operator.plan.status import make_status
from orca.operator.reconcile import observe, reconcile
from support.operator.clusters import BORN_S, RELEASE, FakeCluster, observation
from support.operator.deployments import deployment
from support.operator.fake_api_server import fake_api_server
from support.operator.handshakes import NAME, Files, a_key, ask, issue, secret, shown

DAY_S = 86_400.0
NOW_S = BORN_S
SHOP = deployment()
NAMED = deployment(certificates={"secretName": "team"})


def due(files: Mapping[str, str], now_s: float = NOW_S, of: OrcaDeployment = SHOP) -> IssueCertificate | None:
    return certificates.due(observation(of, {("Secret", "shop-certificates"): secret(files)}, now_s=now_s))


def test_the_same_ca_issues_a_new_certificate_when_a_third_of_its_lifetime_is_left() -> None:
    first = issue()
    assert [due(first, NOW_S + days * DAY_S) for days in (0, 30, 59.9)] == [None] * 3
    later_s = NOW_S + 60 * DAY_S
    found = due(first, later_s)
    assert found is not None
    assert found.reason == "it expires on 2026-04-01 at 00:00 UTC"
    second = issue(signer=found.signer, issued_s=later_s)
    assert due(second, later_s) is None
    assert (second[CA_KEY], second[KEY]) != (first[CA_KEY], first[KEY])
    assert second[CA_KEY] == first[CA_KEY]


def test_renewals_continue_after_the_first_ca_has_expired() -> None:
    files, now_s = issue(), NOW_S
    for _ in range(75):  # 12 years
        now_s += 60 * DAY_S
        found = due(files, now_s)
        assert found is not None
        assert found.reason.startswith("it expires on")
        files = issue(signer=found.signer, issued_s=now_s)
        assert due(files, now_s) is None


def of_another_ca(files: Files) -> Files:
    return files | {key: text for key, text in issue().items() if key in (CERTIFICATE, KEY)}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda _: {}, "there is no ca.crt"),
        *[(lambda files, key=key: files | {key: ""}, f"there is no {key}") for key in FILES],
        *[(lambda files, key=key: files | {key: "spoiled"}, f"{key} cannot be read") for key in FILES],
        (of_another_ca, "tls.crt is not signed by ca.crt"),
        (lambda files: files | {KEY: issue()[KEY]}, "tls.crt does not belong to tls.key"),
    ],
)
def test_a_damaged_certificate_is_issued_again(spoil: Callable[[Files], Files], reason: str) -> None:
    spoiled = spoil(issue())
    found = due(spoiled)
    assert found is not None
    assert (found.reason, found.signer is not None) == (reason, CA_KEY in spoiled)
    made = issue(signer=found.signer)
    assert due(made) is None
    assert made[CA_KEY] == spoiled.get(CA_KEY, made[CA_KEY])


def test_a_certificate_that_is_not_base64_is_issued_again() -> None:
    there = {("Secret", "shop-certificates"): {"data": dict.fromkeys((*FILES, CA_KEY), "=")}}
    found = certificates.due(observation(SHOP, there))
    assert found is not None
    assert found.reason == "ca.crt cannot be read"


def test_another_name_and_a_clock_that_was_set_back_are_reasons_to_issue_again() -> None:
    for files, reason in [
        (issue("shop.elsewhere.svc"), "tls.crt is not for shop.ns.svc"),
        (issue(issued_s=NOW_S + DAY_S), "tls.crt is not valid before 2026-01-01 at 23:00 UTC"),
    ]:
        found = due(files)
        assert found is not None
        assert found.reason == reason
        assert found.signer is not None


def test_a_missing_certificate_is_issued_but_never_a_user_provided_one() -> None:
    found = certificates.due(observation(SHOP))
    assert found is not None
    assert (found.reason, found.signer) == ("it is missing", None)
    assert certificates.due(observation(NAMED)) is None
    assert due({}, of=NAMED) is None


def test_no_private_key_appears_in_the_repr_of_an_action() -> None:
    shown_by_log = repr(IssueCertificate("it ends", a_key(), kept={KEY: "secret"}))
    assert "signer" not in shown_by_log
    assert "secret" not in shown_by_log


# What runs is not touched by a renewal.


def test_the_secret_is_created_before_the_pods_that_mount_it() -> None:
    cluster = FakeCluster(SHOP)
    first, *_ = cluster.reconcile().actions
    assert isinstance(first, IssueCertificate)
    assert first.is_new
    assert cluster.names("Secret") == ["shop-certificates"]


def test_a_renewal_writes_the_secret_and_nothing_else() -> None:
    cluster = FakeCluster(deployment(replicas=2, parallelism={"stages": 2}))
    cluster.settle()
    cluster.now_s += 61 * DAY_S
    [action] = cluster.reconcile().actions
    assert isinstance(action, IssueCertificate)
    assert not action.is_new
    assert cluster.reconcile().actions == ()


def test_new_groups_mount_the_user_provided_secret_instead_of_the_issued_one() -> None:
    cluster = FakeCluster(SHOP)
    cluster.settle()
    [before] = cluster.names("StatefulSet", "stage")
    assert mounted(cluster) == {"shop-certificates"}
    cluster.deployment = deployment(generation=2, certificates={"secretName": "team"})
    cluster.settle()
    assert mounted(cluster) == {"team"}
    assert cluster.names("StatefulSet", "stage") != [before]


def test_the_issued_certificate_is_renewed_until_the_last_group_that_mounts_it_is_gone() -> None:
    cluster = FakeCluster(SHOP)
    cluster.settle()
    cluster.deployment = deployment(generation=2, certificates={"secretName": "team"})
    cluster.reconcile()
    assert mounted(cluster) == {"shop-certificates", "team"}
    cluster.now_s += 61 * DAY_S
    assert [type(action) for action in cluster.reconcile().actions].count(IssueCertificate) == 1
    cluster.settle()
    cluster.now_s += 61 * DAY_S
    assert cluster.reconcile().actions == ()


def mounted(cluster: FakeCluster) -> set[str]:
    """Names of the Secrets that schedulers and stages show certificates of."""
    found = set()
    for role in ("stage", "scheduler"):
        for name in cluster.names("StatefulSet", role):
            pod = cluster.objects["StatefulSet", name]["spec"]["template"]["spec"]
            [volume] = [each["secret"] for each in pod["volumes"] if each["name"] == "certificates"]
            [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "certificates"]
            words = pod["containers"][0]["args"]
            assert [each["key"] for each in volume["items"]] == ["ca.crt", "tls.crt", "tls.key"]
            assert (mount["readOnly"], "subPath" in mount) == (True, False)
            assert words[words.index("--tls-server-name") + 1] == NAME
            for flag, key in (("--tls-ca-file", CA), ("--tls-certificate-file", CERTIFICATE), ("--tls-key-file", KEY)):
                assert words[words.index(flag) + 1] == f"{mount['mountPath']}/{key}"
            found.add(volume["secretName"])
    return found


# Handshakes as scheduler and stages make them.


async def test_certificates_from_before_and_after_a_renewal_trust_each_other(tmp_path: Path) -> None:
    signer = a_key()
    old, new = (shown(issue(signer=signer, issued_s=time.time() - days * DAY_S), tmp_path) for days in (61, 0))
    assert old.ca.read_bytes() != new.ca.read_bytes()
    for server, client in [(old, new), (new, old), (old, old), (new, new)]:
        assert await ask(server, client) == "here"


async def test_servers_and_clients_refuse_expired_certificates_and_those_of_another_ca(tmp_path: Path) -> None:
    signer = a_key()
    good, ended = (shown(issue(signer=signer, issued_s=time.time() - days * DAY_S), tmp_path) for days in (0, 91))
    strange = replace(shown(issue(issued_s=time.time()), tmp_path), ca=good.ca)
    for bad in (ended, strange):
        with pytest.raises(aio.AioRpcError):
            await ask(good, bad)
        with pytest.raises(aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
            await ask(bad, good)


# What the status says.


def told(cluster: FakeCluster, at_s: float, refusals: Sequence[Refusal] = ()) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    seen = replace(cluster.observed, now_s=at_s)
    found = make_status(seen, make_plan(seen), {}, refusals)
    return {each["type"]: (each["status"], each["reason"]) for each in found["conditions"]}


def named_cluster(files: Mapping[str, str] | None) -> FakeCluster:
    cluster = FakeCluster(NAMED)
    cluster.named_certificates = None if files is None else secret(files)
    cluster.settle()
    return cluster


def test_a_user_provided_certificate_near_its_expiry_is_reported_while_groups_still_serve() -> None:
    cluster = named_cluster(issue())
    assert told(cluster, NOW_S + 75 * DAY_S)["Degraded"] == ("False", "AsWanted")
    soon = told(cluster, NOW_S + 77 * DAY_S)
    assert (soon["Degraded"], soon["Ready"]) == (("True", "CertificateExpiring"), ("True", "Serving"))
    assert told(cluster, NOW_S + 90 * DAY_S)["Degraded"] == ("True", "CertificateExpired")


def test_groups_that_do_not_form_report_an_expired_certificate() -> None:
    cluster = named_cluster(issue())
    [scheduler] = cluster.names("Pod", "scheduler")
    cluster.make_unready(scheduler)
    assert told(cluster, NOW_S + DAY_S)["SchedulerReady"] == ("False", "GroupForming")
    assert told(cluster, NOW_S + 90 * DAY_S)["SchedulerReady"] == ("False", "CertificateExpired")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (None, "SecretMissing"),
        *[({key: text for key, text in issue().items() if key != missing}, "SecretMissing") for missing in FILES],
        (issue() | {CERTIFICATE: "spoiled"}, "CertificateUnfit"),
        (issue("shop.elsewhere.svc"), "CertificateUnfit"),
    ],
)
def test_an_unusable_user_provided_secret_is_reported_until_it_is_usable(files: Files | None, reason: str) -> None:
    cluster = named_cluster(files)
    assert told(cluster, NOW_S)["Degraded"] == ("True", reason)
    cluster.named_certificates = secret(issue("*.ns.svc"))
    assert told(cluster, NOW_S)["Degraded"] == ("False", "AsWanted")


def test_a_missing_user_provided_secret_is_reported_as_what_stage_pods_wait_for() -> None:
    cluster = named_cluster(None)
    [stage] = cluster.names("Pod", "stage")
    cluster.make_unready(stage)
    found = told(cluster, NOW_S)
    assert found["WorkersReady"] == found["Ready"] == ("False", "SecretMissing")


def test_the_issued_certificate_is_reported_only_if_the_api_server_refuses_its_renewal() -> None:
    cluster = FakeCluster(SHOP)
    cluster.settle()
    late_s = NOW_S + 77 * DAY_S
    due_now = told(cluster, late_s)
    assert (due_now["Degraded"][0], due_now["Ready"]) == ("False", ("True", "Serving"))
    [action] = make_plan(replace(cluster.observed, now_s=late_s)).actions
    refused = told(cluster, late_s, [Refusal(action, "quota")])
    assert refused["Degraded"] == ("True", "CertificateExpiring")
    assert refused["Accepted"] == ("False", "Refused")


# A reconcile against an fake API server.

SECRETS = "/api/v1/namespaces/ns/secrets"


def test_a_reconcile_creates_the_secret_and_the_next_one_keeps_it() -> None:
    with fake_api_server() as (fake, cluster):
        reconcile_once(cluster, SHOP)
        made = fake.objects[f"{SECRETS}/shop-certificates"]
        assert certificates.due(observation(SHOP, {("Secret", "shop-certificates"): made}, now_s=time.time())) is None
        assert "ownerReferences" not in made["metadata"]
        reconcile_once(cluster, SHOP)
        assert fake.calls("PATCH", "secrets/shop-certificates") == 1


def test_a_retained_secret_is_used_when_the_resource_is_created_again() -> None:
    with fake_api_server() as (fake, cluster):
        reconcile_once(cluster, SHOP)
        reconcile_once(cluster, replace(SHOP, uid="uid-2"))
        assert fake.calls("PATCH", "secrets/shop-certificates") == 1


def test_the_secret_is_deleted_with_the_resource_if_the_deletion_policy_says_so() -> None:
    with fake_api_server() as (fake, cluster):
        reconcile_once(cluster, deployment(deletionPolicy="Delete"))
        [owner] = fake.objects[f"{SECRETS}/shop-certificates"]["metadata"]["ownerReferences"]
        assert owner["uid"] == "uid-1"


def test_a_secret_of_that_name_that_the_operator_does_not_own_is_left_unchanged() -> None:
    with fake_api_server() as (fake, cluster):
        his = {"metadata": {"name": "shop-certificates"}, "data": {}}
        fake.objects[f"{SECRETS}/shop-certificates"] = his
        reconcile_once(cluster, SHOP)
        assert fake.calls("PATCH", "secrets/shop-certificates") == 0


def test_a_damaged_secret_is_repaired_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with fake_api_server() as (fake, cluster), caplog.at_level("INFO"):
        reconcile_once(cluster, SHOP)
        made = fake.objects[f"{SECRETS}/shop-certificates"]
        fake.objects[f"{SECRETS}/shop-certificates"] = {**made, "data": made["data"] | {KEY: ""}}
        reconcile_once(cluster, SHOP)
        again = fake.objects[f"{SECRETS}/shop-certificates"]
    assert again["data"][KEY] not in ("", made["data"][KEY])
    assert again["data"][CA_KEY] == made["data"][CA_KEY]
    issued = [vars(each) for each in caplog.records if each.message == "issue"]
    assert [each["reason"] for each in issued] == ["it is missing", "there is no tls.key"]


def test_a_secret_that_changes_while_it_is_written_is_not_issued_again_at_each_reconcile() -> None:
    def without_key(body: Json) -> Json:
        return {**body, "data": {**body["data"], KEY: ""}} if body.get("kind") == "Secret" else body

    with fake_api_server() as (fake, cluster):
        fake.admits = without_key
        refusals = Refusals(lambda: 0.0)
        for _ in range(3):
            reconcile(cluster, observe(cluster, RELEASE, SHOP, frozenset()), {}, refusals)
        assert fake.calls("PATCH", "secrets/shop-certificates") == 1
        [accepted] = [each for each in fake.status("shop")["conditions"] if each["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("False", "Refused")
    assert (
        "somebody changes the Secret shop-certificates while it is written: there is no tls.key" in accepted["message"]
    )


def test_a_secret_that_is_damaged_after_each_write_is_not_issued_again_at_each_reconcile() -> None:
    path, now_s, drawn_at = f"{SECRETS}/shop-certificates", 0.0, []
    with fake_api_server() as (fake, cluster):
        refusals = Refusals(lambda: now_s)
        for now_s in range(0, 40, 2):
            before = fake.calls("PATCH", "secrets/shop-certificates")
            reconcile(cluster, observe(cluster, RELEASE, SHOP, frozenset()), {}, refusals)
            if fake.calls("PATCH", "secrets/shop-certificates") > before:
                drawn_at.append(now_s)
                fake.objects[path] |= {"data": {}}
        [accepted] = [each for each in fake.status("shop")["conditions"] if each["type"] == "Accepted"]
    assert drawn_at == [0, 6, 16, 36]
    assert accepted["message"].startswith("somebody has changed the Secret shop-certificates since it was written")


def test_only_the_user_provided_secret_is_read() -> None:
    with fake_api_server() as (fake, cluster):
        fake.objects[f"{SECRETS}/team"] = {"metadata": {"name": "team"}, **secret(issue())}
        assert observe(cluster, RELEASE, NAMED, frozenset()).named_certificates == fake.objects[f"{SECRETS}/team"]
        reconcile_once(cluster, NAMED)
        assert fake.calls("GET", "secrets/team") == 2
        assert names.certificates("shop") not in str(fake.objects.keys())


@pytest.mark.parametrize(
    "marks",
    [{}, {"labels": {names.DEPLOYMENT_LABEL: "shop", names.ROLE_LABEL: "scheduler"}}],
    ids=["unlabelled", "with our labels"],
)
def test_a_user_provided_secret_with_the_name_of_the_issued_one_is_only_read(marks: Json) -> None:
    of = deployment(certificates={"secretName": "shop-certificates"})
    with fake_api_server() as (fake, cluster):
        there = {**secret(issue()), "metadata": {"name": "shop-certificates", **marks}}
        fake.objects[f"{SECRETS}/shop-certificates"] = there
        for _ in range(2):
            reconcile_once(cluster, of)
        assert fake.calls("PATCH", "secrets/shop-certificates") == 0
        [accepted] = [each for each in fake.status("shop")["conditions"] if each["type"] == "Accepted"]
        assert accepted["status"] == "True"


def reconcile_once(cluster: Cluster, of: OrcaDeployment) -> None:
    reconcile(cluster, observe(cluster, RELEASE, of, frozenset()), {}, Refusals(time.monotonic))
