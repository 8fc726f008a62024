"""Connect to Redis as a user (access.py), with a password and certificates from files.

Files hold the secrets. Each connect reads them again, so that a rotated secret takes effect at the next connect. No URL
holds a secret, since URLs end up in process lists and logs.
"""

from pathlib import Path
from typing import Any

from redis.asyncio.connection import SSLConnection, parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError  # noqa: A004 - a RedisError, as its callers expect

from orca.pool.redis.access import read_secret
from orca.pool.settings import PoolSettings


def connection_options(url: str, settings: PoolSettings) -> dict[str, Any]:
    """Return the options with which redis-py connects.

    Raises: ValueError if the URL holds a user or password, or does not fit the files. Its text never holds the URL.
    """
    _, _, place = url.partition("://")
    if "password=" in place or ("@" in place and not url.startswith("unix:")):
        raise ValueError("its URL holds a user or password; set ORCA_POOL_USER and ORCA_POOL_PASSWORD_FILE instead")
    options: dict[str, Any] = dict(parse_url(url))
    if settings.password_file is not None:
        options["credential_provider"] = _FileCredentials(settings.user, Path(settings.password_file))
    files = (settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file)
    if options.get("connection_class") is SSLConnection:
        ca, certificate, key = files
        options |= {"ssl_ca_certs": ca, "ssl_certfile": certificate, "ssl_keyfile": key}
        options["connection_class"] = _RotatingTls
    elif any(files):
        raise ValueError("certificates are set, but its URL is not rediss://, so nothing would be encrypted")
    return options


class _FileCredentials(CredentialProvider):
    """Reads the password for each new connection of redis-py."""

    def __init__(self, user: str, password_file: Path) -> None:
        self._user = user
        self._password_file = password_file

    async def get_credentials_async(self) -> tuple[str, str]:
        try:
            return self._user, read_secret(self._password_file)
        except OSError as error:
            # redis-py would treat an OSError as an error of the socket.
            raise ConnectionError(f"password file {self._password_file}: {error.strerror}") from error


class _RotatingTls(SSLConnection):
    """Reads its certificates at each connect; redis-py would keep those of the first connect for ever."""

    async def connect(self) -> None:
        self.ssl_context.context = None
        await super().connect()  # type: ignore[no-untyped-call]
