"""Who may do what in Redis, and how a part proves that it is that user: name, password and certificates from files.

All parts of a deployment are one Redis user that may touch the keys of its deployment, listen to its channel and call
what the scripts and this package call, and nothing else. Of an external Redis its administrator writes
the lines of `orca pool acl` into its ACL file. They keep the rights of the default user though it is off: Redis reads
its append-only file back with them, and without them forgets every request when it restarts.

Secrets stand in files, read anew for each connection, so that a rotated one takes effect at the next. They are in no
URL, since URLs end up in process lists and logs.
"""

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio.connection import SSLConnection, parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError  # noqa: A004 - a RedisError, as its callers expect

from orca.pool.keys import Keys
from orca.pool.settings import PoolSettings

LOCAL_USER = "orca"
"""The user of a Redis that `orca up` starts."""

DEFAULT_USER_WARNING = (
    "Redis reads its append-only file back with the rights of its default user. It may be off, as here, but must keep\n"
    "them: without, a restart refuses the file's transactions and forgets every request."
)
_DEFAULT_USER = "user default off ~* &* +@all"

# What the scripts call, then what is called directly; PING and SELECT are the client library's.
COMMANDS = (
    *("exists", "get", "hdel", "hexists", "hget", "hgetall", "hincrby", "hkeys", "hmget", "hset", "hsetnx", "publish"),
    *("set", "time", "unlink", "xadd", "xlen", "xrange", "zadd", "zcard", "zrange"),
    *("xrevrange", "zrangebyscore", "zrem", "zremrangebyscore", "zrevrange", "zscore", "info"),
    *("eval", "evalsha", "subscribe", "unsubscribe", "wait"),
    *("ping", "select"),
    # Of the release before, beside which this one runs during a rollout.
    *("sadd", "sismember"),
)


def acl_words(deployment: str) -> list[str]:
    """The rights of a deployment's user as words of an ACL line, without its name and password."""
    keys = Keys(deployment)
    rights = [f"~{keys.prefix}*", "resetchannels", f"&{keys.single('news')}", "-@all"]
    return [*rights, *(f"+{command}" for command in COMMANDS)]


def acl_lines(deployment: str, user: str, secret: str) -> list[str]:
    """Lines of an ACL file for the default user, off, and a deployment's. Args: secret: `>PASSWORD` or its digest."""
    return [_DEFAULT_USER, " ".join(["user", user, "on", secret, *acl_words(deployment)])]


def password_digest(password_file: Path) -> str:
    """A password as an ACL file holds it. Raises: OSError."""
    return "#" + hashlib.sha256(_read_secret(password_file).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LocalAccess:
    """The one user of a Redis of our own: its password in a file that only this account of the machine can read."""

    password_file: Path
    acl_file: Path

    @classmethod
    def prepare(cls, folder: Path, deployment: str) -> "LocalAccess":
        """Write both files; the password is drawn once and stays with the folder.

        The default user is off. Users that somebody else wrote into the file stay, for those who want to look inside.
        """
        access = cls.at(folder)
        if not access.password_file.exists():
            _write_privately(access.password_file, secrets.token_urlsafe(32))
        own = acl_lines(deployment, LOCAL_USER, password_digest(access.password_file))
        known = access.acl_file.read_text().splitlines() if access.acl_file.exists() else []
        others = [line for line in known if line.split()[:2] not in (["user", "default"], ["user", LOCAL_USER], [])]
        _write_privately(access.acl_file, "\n".join([*own, *others, ""]))
        return access

    @classmethod
    def at(cls, folder: Path) -> "LocalAccess":
        """Where the files of a Redis in `folder` are."""
        return cls(folder / "password", folder / "users.acl")

    @property
    def password(self) -> str:
        return _read_secret(self.password_file)


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
            return self._user, _read_secret(self._password_file)
        except OSError as error:
            # As it is, redis-py would take it for an error of the socket.
            raise ConnectionError(f"password file {self._password_file}: {error.strerror}") from error


class _RotatingTls(SSLConnection):
    """Reads its certificates at each connect; redis-py would keep those of its first one for ever."""

    async def connect(self) -> None:
        self.ssl_context.context = None
        await super().connect()  # type: ignore[no-untyped-call]


def _read_secret(path: Path) -> str:
    # Editors and `kubectl create secret` leave a newline behind.
    return path.read_text().strip()


def _write_privately(path: Path, text: str) -> None:
    """All or nothing, and never readable by others, not for a moment."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
