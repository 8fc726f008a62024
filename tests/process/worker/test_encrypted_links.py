"""gRPC links with certificates: encrypted both ways, and nobody without one of the CA gives orders."""

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from grpc import StatusCode, aio, ssl_channel_credentials

from handshake import shown_certificate
from orca.bench.parts.stage_processes import Stages, new_request
from orca.core.domain.errors import EngineError, SettingError
from orca.core.domain.step import Step
from orca.core.transport import grpc_links
from orca.core.transport.tls_files import TlsFiles
from orca.scheduler.engines.grpc_engine import GrpcEngine
from orca.scheduler.settings import parse_settings as parse_scheduler
from orca.worker.settings import parse_settings as parse_worker
from support.certificates import Authority
from support.worker.answering_stage import ask, serving
from support.worker.engine_builders import generate, next_result

StartEngine = Callable[..., GrpcEngine]
NAME = "shop.default.svc"


def certificates(authority: Authority, name: str) -> TlsFiles:
    own = authority.issue(name)
    return TlsFiles(ca=authority.ca, certificate=own.certificate, key=own.key)


def named_certificates(authority: Authority) -> TlsFiles:
    """One for all parts of a deployment, none of which is reached by the name in it."""
    own = authority.issue("all", f"DNS:{NAME}")
    return TlsFiles(authority.ca, own.certificate, own.key, NAME)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
async def address(authority: Authority) -> AsyncIterator[str]:
    """Serve a stage that shows and demands certificates of the authority. Yields: its address."""
    async with serving(certificates(authority, "stage")) as address:
        yield address


async def test_a_stage_answers_clients_with_a_certificate_of_the_ca(address: str, authority: Authority) -> None:
    assert await ask(grpc_links.open_channel(address, certificates(authority, "scheduler"))) == "here"


async def test_a_stage_answers_no_other_client(address: str, authority: Authority, tmp_path: Path) -> None:
    strangers = Authority(tmp_path / "strangers")
    posing = strangers.issue("scheduler")
    # Each knows the right CA, so that it is the stage that refuses.
    refused = [
        grpc_links.open_channel(address),
        aio.secure_channel(address, ssl_channel_credentials(authority.ca.read_bytes())),
        grpc_links.open_channel(address, TlsFiles(authority.ca, posing.certificate, posing.key)),
    ]
    for channel in refused:
        with pytest.raises(aio.AioRpcError) as error:
            await ask(channel)
        assert error.value.code() == StatusCode.UNAVAILABLE


async def test_a_stage_with_a_certificate_of_another_ca_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
        await ask(grpc_links.open_channel(address, certificates(Authority(tmp_path / "strangers"), "scheduler")))


async def test_a_rotated_certificate_of_a_stage_counts_from_the_next_handshake(
    address: str, authority: Authority
) -> None:
    own = certificates(authority, "scheduler")
    rotated = certificates(authority, "stage")
    shown = await asyncio.to_thread(shown_certificate, address, own)
    assert shown == rotated.certificate.read_text()
    rotated.key.unlink()  # and in the middle of a rotation the last good one goes on
    assert await ask(grpc_links.open_channel(address, own)) == "here"


async def test_a_client_with_a_server_name_checks_it_instead_of_the_host(authority: Authority) -> None:
    named, of_host = named_certificates(authority), certificates(authority, "host")
    async with serving(named) as address:
        assert await ask(grpc_links.open_channel(address, named)) == "here"
        with pytest.raises(aio.AioRpcError, match="Hostname Verification Check failed"):
            await ask(grpc_links.open_channel(address, of_host))
    async with serving(of_host) as address:
        with pytest.raises(aio.AioRpcError, match="Hostname Verification Check failed"):
            await ask(grpc_links.open_channel(address, named))


class Relay:
    """Links of the scheduler to a stage that a test can cut. A new connection passes."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._open: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def start(self, stack: contextlib.AsyncExitStack) -> str:
        """Returns: host:port in place of the target's."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        stack.push_async_callback(server.wait_closed)
        stack.callback(server.close)
        stack.callback(self.cut)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for writer in [*self._open]:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there = await asyncio.open_connection(self._host, self._port)
        except ConnectionRefusedError:  # the stage still starts
            writer.transport.abort()
            return
        await asyncio.gather(self._carry(reader, there[1]), self._carry(there[0], writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.transport.abort()
        self._open.discard(writer)


@pytest.fixture(scope="module")
def encrypted(start_stages: Callable[..., Stages], tmp_path_factory: pytest.TempPathFactory) -> tuple[Stages, TlsFiles]:
    """Two real stages, and what they and their scheduler show."""
    authority = Authority(tmp_path_factory.mktemp("ca"))
    shared = named_certificates(authority)
    flags = ["--tls-ca-file", shared.ca, "--tls-certificate-file", shared.certificate, "--tls-key-file", shared.key]
    return start_stages(2, 1, *map(str, flags), "--tls-server-name", NAME), shared


async def test_a_group_works_over_encrypted_links(
    encrypted: tuple[Stages, TlsFiles], start_engine: StartEngine
) -> None:
    stages, shared = encrypted
    engine = start_engine(stages.addresses, certificates=shared)
    epoch = stages.next_epoch()
    await engine.form(epoch)
    tokens = await generate(engine, epoch, [new_request(1, (3, 4, 5), 3)], [3], stages=2)
    assert len(tokens[1]) == 3


async def test_a_scheduler_without_certificates_forms_no_epoch(
    encrypted: tuple[Stages, TlsFiles], start_engine: StartEngine
) -> None:
    engine = start_engine(encrypted[0].addresses, join_timeout_s=1.0)
    with pytest.raises(EngineError, match="does not answer"):
        await engine.form(encrypted[0].next_epoch())


async def test_a_group_keeps_running_while_its_certificates_are_replaced_and_forms_again_with_the_new_ones(
    encrypted: tuple[Stages, TlsFiles], start_engine: StartEngine, tmp_path: Path
) -> None:
    stages, shared = encrypted
    async with contextlib.AsyncExitStack() as stack:
        relays = [Relay(address) for address in stages.addresses]
        engine = start_engine([await relay.start(stack) for relay in relays], certificates=shared)
        before, after = stages.next_epoch(), stages.next_epoch()
        await engine.form(before)
        await engine.submit(Step(epoch=before, number=1, freed=(), new=(), rows=()))
        await next_result(engine)
        connections = [relay.connections for relay in relays]
        # Of another CA: peers refuse the earlier certificate as if it had expired.
        replace(shared, named_certificates(Authority(tmp_path / "another")))
        request = [new_request(1, (3, 4, 5), 3)]
        tokens = await generate(engine, before, request, [3], stages=2, steps_before=1)
        assert [relay.connections for relay in relays] == connections, "a link was opened anew within the epoch"
        for relay in relays:
            relay.cut()
        await engine.form(after)
        assert await generate(engine, after, request, [3], stages=2) == tokens


def replace(shown: TlsFiles, others: TlsFiles) -> None:
    for old, new in ((shown.ca, others.ca), (shown.certificate, others.certificate), (shown.key, others.key)):
        shutil.copyfile(new, old)


def test_a_certificate_that_cannot_be_read_is_named(authority: Authority, tmp_path: Path) -> None:
    own = authority.issue("scheduler")
    with pytest.raises(EngineError, match=f"{tmp_path}/none.pem: No such file"):
        grpc_links.open_channel("127.0.0.1:1", TlsFiles(tmp_path / "none.pem", own.certificate, own.key))


class ReadOnce(type(Path())):  # type: ignore[misc]
    """A file behind whose first reading something happens."""

    def read_bytes(self) -> bytes:
        content: bytes = super().read_bytes()
        self.happens, happens = lambda: None, self.happens
        happens()
        return content


def test_files_replaced_between_two_reads_are_read_consistently(authority: Authority, tmp_path: Path) -> None:
    shown, others = certificates(authority, "old"), certificates(Authority(tmp_path / "another"), "new")
    certificate = ReadOnce(shown.certificate)
    certificate.happens = lambda: replace(shown, others)
    assert dataclasses.replace(shown, certificate=certificate).read() == others.read()


@pytest.mark.parametrize("parse", [parse_worker, parse_scheduler], ids=["worker", "scheduler"])
def test_all_three_certificate_files_or_none_must_be_set(parse: Callable[..., object]) -> None:
    flags = ["--model", "/m", "--stages", "1" if parse is parse_worker else "127.0.0.1:1"]
    parse(flags, {})
    with pytest.raises(SettingError, match="setting tls_certificate_file: set all of tls_ca_file, tls_cert"):
        parse([*flags, "--tls-ca-file", "/ca"], {})


@pytest.mark.parametrize("parse", [parse_worker, parse_scheduler], ids=["worker", "scheduler"])
def test_a_server_name_without_certificate_files_is_refused(parse: Callable[..., object]) -> None:
    flags = ["--model", "/m", "--stages", "1" if parse is parse_worker else "127.0.0.1:1"]
    with pytest.raises(SettingError, match="setting tls_server_name: it needs tls_ca_file, tls_certificate_file"):
        parse([*flags, "--tls-server-name", NAME], {})
