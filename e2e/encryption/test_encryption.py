"""Links of schedulers and stages: others get no answer, and a renewal under load restarts nothing."""

import asyncio
import base64
import json
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from grpc import StatusCode, aio

from figures import record_figures
from handshake import shown_certificate
from installation import Json, Service, uids, wait_until
from load import Load
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links
from orca.core.transport.tls_files import TlsFiles
from orca.operator.cluster import credentials

pytestmark = [pytest.mark.e2e, pytest.mark.own_cluster, pytest.mark.timeout(900)]

DAY_S = 86_400.0
BROUGHT_S = 180.0
"""A kubelet updates a changed Secret in its pods at its next sync: after a minute, and the time of its cache."""


def test_a_stage_answers_its_scheduler_and_nobody_without_a_certificate(service: Service, tmp_path: Path) -> None:
    shown = certificates(service, tmp_path)
    for address in stages(service):
        assert asyncio.run(ask(address, shown)) is StatusCode.OK
        assert asyncio.run(ask(address, None)) is StatusCode.UNAVAILABLE
        assert asyncio.run(ask(address, of_strangers(service, shown, tmp_path))) is StatusCode.UNAVAILABLE


def test_a_renewal_restarts_no_pod_and_costs_no_answer(service: Service, load: Load, tmp_path: Path) -> None:
    before, made = pods(service), secret(service)
    near_its_end = issued_before(service, made, days=80)
    with load.running():
        patch = json.dumps({"stringData": near_its_end})
        service.kubectl("patch", "secret", name(service), *where(service), "--type=merge", f"--patch={patch}")
        began = time.monotonic()
        known = (made["tls.crt"], near_its_end["tls.crt"])
        wait_until(lambda: secret(service)["tls.crt"] not in known, service.describe)
        renewed_s = time.monotonic() - began
        renewed = secret(service)["tls.crt"]
        shown = certificates(service, tmp_path)
        wait_until(
            lambda: all(shown_certificate(address, shown) == renewed for address in stages(service)),
            service.describe,
            within_s=BROUGHT_S,
        )
        brought_s = time.monotonic() - began
    record_figures(
        "renewed certificates", {"in the Secret_s": round(renewed_s, 1), "in the pods_s": round(brought_s, 1)}
    )
    assert pods(service) == before
    load.check()


def test_a_group_forms_anew_with_what_was_renewed(service: Service) -> None:
    gone = service.pods("stage")[0]
    service.kubectl("delete", "pod", gone["metadata"]["name"], "--force", "--grace-period=0", *where(service))
    wait_until(lambda: uids([gone]) - uids(service.pods("stage")) != set(), service.describe)
    service.wait_until_settled()


def where(service: Service) -> tuple[str]:
    return (f"--namespace={service.namespace}",)


def name(service: Service) -> str:
    return f"{service.name}-certificates"


def server_name(service: Service) -> str:
    return f"{service.name}.{service.namespace}.svc"


def secret(service: Service) -> dict[str, str]:
    """PEM by key."""
    found: Json = service.kubectl.get("secret", name(service), *where(service))
    return {key: base64.b64decode(text).decode() for key, text in found["data"].items()}


def issued_before(service: Service, made: dict[str, str], *, days: float) -> dict[str, str]:
    """Return a certificate that the deployment's CA could have signed this number of days ago."""
    signer = load_pem_private_key(made["ca.key"].encode(), password=None)
    return credentials.issue(service.name, server_name(service), signer, time.time() - days * DAY_S)  # type: ignore[arg-type]


def pods(service: Service) -> set[tuple[str, int]]:
    """Return the running containers, with the number of restarts of each."""
    return {
        (pod["metadata"]["uid"], each["restartCount"])
        for pod in service.pods()
        for each in pod["status"]["containerStatuses"]
    }


def stages(service: Service) -> list[str]:
    return [f"{pod['status']['podIP']}:7000" for pod in service.pods("stage")]


def certificates(service: Service, folder: Path) -> TlsFiles:
    """Return the certificates of the deployment."""
    return write_files(secret(service), folder / "own", server_name(service))


def of_strangers(service: Service, known: TlsFiles, folder: Path) -> TlsFiles:
    """Return certificates of a stranger, who trusts the deployment's CA but has another one."""
    files = credentials.issue(service.name, server_name(service), None, time.time())
    files["ca.crt"] = known.ca.read_text()
    return write_files(files, folder / "strange", server_name(service))


def write_files(files: dict[str, str], folder: Path, server_name: str) -> TlsFiles:
    folder.mkdir(exist_ok=True)
    for key in ("ca.crt", "tls.crt", "tls.key"):
        (folder / key).write_text(files[key])
    return TlsFiles(folder / "ca.crt", folder / "tls.crt", folder / "tls.key", server_name)


async def ask(address: str, shown: TlsFiles | None) -> StatusCode:
    """Return a stage's answer to a status request."""
    async with grpc_links.open_channel(address, shown) as channel:
        try:
            await grpc_links.stage_stub(channel).Status(pb.StatusRequest(), timeout=10)
        except aio.AioRpcError as error:
            code: StatusCode = error.code()
            return code
    return StatusCode.OK
