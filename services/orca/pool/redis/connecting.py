"""How a part reaches Redis and proves which user it is (access.py): name, password and certificates from files.

Secrets stand in files, read anew for each connection, so that a rotated one takes effect at the next. They are in no
URL, since URLs end up in process lists and logs.
"""

from pathlib import Path
from typing import Any

from redis.asyncio.connection import SSLConnection, parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError  # noqa: A004 - a RedisError, as its callers expect

from orca.pool.redis.access import read_secret
from orca.pool.settings import PoolSettings


def connection_options(url: str, settings: PoolSettings) -> dict[str, Any]:
    """What redis-py needs to connect.

    Raises: ValueError, which never holds the URL, when it has a user or password in it or does not fit the files.
    """
    _, _, place = url.partition("://")
    if "password=" in place or ("@" in place and not url.startswith("unix:")):
        raise ValueError("its URL holds a user or password; name them by ORCA_POOL_USER and ORCA_POOL_PASSWORD_FILE")
    options: dict[str, Any] = dict(parse_url(url))
    if settings.password_file is not None:
        options["credential_provider"] = _FileCredentials(settings.user, Path(settings.password_file))
    files = (settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file)
    if options.get("connection_class") is SSLConnection:
        ca, certificate, key = files
        options |= {"ssl_ca_certs": ca, "ssl_certfile": certificate, "ssl_keyfile": key}
        options["connection_class"] = _RotatingTls
    elif any(files):
        raise ValueError("certificates are named, but its URL is not rediss://: nothing would be encrypted")
    return options


class _FileCredentials(CredentialProvider):
    """Asked by redis-py for each new connection."""

    def __init__(self, user: str, password_file: Path) -> None:
        self._user = user
        self._password_file = password_file

    async def get_credentials_async(self) -> tuple[str, str]:
        try:
            return self._user, read_secret(self._password_file)
        except OSError as error:
            # As it is, redis-py would take it for an error of the socket.
            raise ConnectionError(f"password file {self._password_file}: {error.strerror}") from error


class _RotatingTls(SSLConnection):
    """Reads its certificates at each connect; redis-py would keep those of its first one for ever."""

    async def connect(self) -> None:
        self.ssl_context.context = None
        await super().connect()  # type: ignore[no-untyped-call]
