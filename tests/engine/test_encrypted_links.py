"""gRPC links with certificates: encrypted both ways, and nobody without one of the CA gives orders."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from certificates import Authority
from engine_builders import Stages, generate, new_request
from grpc import StatusCode, aio, ssl_channel_credentials

from orca.core import engine_pb2 as pb
from orca.core import engine_pb2_grpc, links
from orca.core.certificates import Certificates
from orca.core.errors import EngineError, SettingError
from orca.scheduler.grpc_engine import GrpcEngine
from orca.scheduler.settings import parse_settings as parse_scheduler
from orca.worker.settings import parse_settings as parse_worker

StartEngine = Callable[..., GrpcEngine]


class Answering(engine_pb2_grpc.StageServicer):
    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:  # noqa: N802, ARG002
        return pb.StatusReply(process="here")


def certificates(authority: Authority, name: str) -> Certificates:
    own = authority.issue(name)
    return Certificates(ca=authority.ca, certificate=own.certificate, key=own.key)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
async def address(authority: Authority) -> AsyncIterator[str]:
    """Of a stage that shows and wants certificates of the authority."""
    server = links.new_server()
    links.serve_stage(server, Answering())
    port = links.listen(server, "127.0.0.1:0", certificates(authority, "stage"))
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def ask(channel: aio.Channel) -> str:
    async with channel:
        reply = await links.stage_stub(channel).Status(pb.StatusRequest(), timeout=10, wait_for_ready=False)
        return str(reply.process)


async def test_a_stage_answers_who_shows_a_certificate_of_the_ca(address: str, authority: Authority) -> None:
    assert await ask(links.open_channel(address, certificates(authority, "scheduler"))) == "here"


async def test_nobody_else_is_answered(address: str, authority: Authority, tmp_path: Path) -> None:
    strangers = Authority(tmp_path / "strangers")
    posing = strangers.issue("scheduler")
    # Each knows the right CA, so that it is the stage that refuses.
    refused = [
        links.open_channel(address),
        aio.secure_channel(address, ssl_channel_credentials(authority.ca.read_bytes())),
        links.open_channel(address, Certificates(authority.ca, posing.certificate, posing.key)),
    ]
    for channel in refused:
        with pytest.raises(aio.AioRpcError) as error:
            await ask(channel)
        assert error.value.code() == StatusCode.UNAVAILABLE


async def test_a_stage_of_strangers_is_not_talked_to(address: str, tmp_path: Path) -> None:
    with pytest.raises(aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
        await ask(links.open_channel(address, certificates(Authority(tmp_path / "strangers"), "scheduler")))


async def test_a_rotated_certificate_of_a_stage_counts_from_the_next_handshake(
    address: str, authority: Authority
) -> None:
    own = certificates(authority, "scheduler")
    rotated = certificates(authority, "stage")
    shown = await asyncio.to_thread(shown_certificate, address, own)
    assert shown == rotated.certificate.read_text()
    rotated.key.unlink()  # and in the middle of a rotation the last good one goes on
    assert await ask(links.open_channel(address, own)) == "here"


def shown_certificate(address: str, own: Certificates) -> str:
    """What a server shows of itself (PEM)."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(own.ca))
    context.load_cert_chain(own.certificate, own.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=10) as link,
        context.wrap_socket(link, server_hostname=host) as encrypted,
    ):
        shown = encrypted.getpeercert(binary_form=True)
    assert shown is not None
    return ssl.DER_cert_to_PEM_cert(shown)


@pytest.fixture(scope="module")
def encrypted(
    start_stages: Callable[..., Stages], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Stages, Certificates]:
    """Two real stages, and the certificates of their scheduler."""
    authority = Authority(tmp_path_factory.mktemp("ca"))
    stage = authority.issue("stage")
    flags = ["--tls-ca-file", authority.ca, "--tls-certificate-file", stage.certificate, "--tls-key-file", stage.key]
    return start_stages(2, 1, *map(str, flags)), certificates(authority, "scheduler")


async def test_a_group_works_over_encrypted_links(
    encrypted: tuple[Stages, Certificates], start_engine: StartEngine
) -> None:
    stages, own = encrypted
    engine = start_engine(stages.addresses, certificates=own)
    epoch = stages.next_epoch()
    await engine.form(epoch)
    tokens = await generate(engine, epoch, [new_request(1, (3, 4, 5), 3)], [3], stages=2)
    assert len(tokens[1]) == 3


async def test_a_scheduler_without_certificates_forms_no_epoch(
    encrypted: tuple[Stages, Certificates], start_engine: StartEngine
) -> None:
    engine = start_engine(encrypted[0].addresses, join_timeout_s=1.0)
    with pytest.raises(EngineError, match="does not answer"):
        await engine.form(encrypted[0].next_epoch())


def test_a_certificate_that_cannot_be_read_is_named(authority: Authority, tmp_path: Path) -> None:
    own = authority.issue("scheduler")
    with pytest.raises(EngineError, match=f"{tmp_path}/none.pem: No such file"):
        links.open_channel("127.0.0.1:1", Certificates(tmp_path / "none.pem", own.certificate, own.key))


@pytest.mark.parametrize("parse", [parse_worker, parse_scheduler], ids=["worker", "scheduler"])
def test_all_three_files_or_none(parse: Callable[..., object]) -> None:
    flags = ["--model", "/m", "--stages", "1" if parse is parse_worker else "127.0.0.1:1"]
    parse(flags, {})
    with pytest.raises(SettingError, match="setting tls_certificate_file: tls_ca_file, tls_certificate_file"):
        parse([*flags, "--tls-ca-file", "/ca"], {})
