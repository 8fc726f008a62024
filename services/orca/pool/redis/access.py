"""Access rights in Redis. How a part logs in as a user is in connecting.py.

All parts of a deployment share one Redis user. It may touch the keys of its deployment, listen to its channel and call
the commands of the scripts and of this package, and nothing else. The administrator of an external Redis writes the
lines of `orca pool acl` into its ACL file. These lines turn the default user off but keep its rights: Redis reads its
append-only file back with them, and without them it forgets every request when it restarts.
"""

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from orca.pool.redis.keys import Keys

LOCAL_USER = "orca"
"""The user of a Redis that `orca up` starts."""

DEFAULT_USER_WARNING = (
    "Redis reads its append-only file back with the rights of its default user. It may be off, as here, but must\n"
    "keep its rights: without them, a restart refuses the file's transactions and forgets every request."
)
_DEFAULT_USER = "user default off ~* &* +@all"

# The commands of the scripts, then those that are called directly; the client library calls PING and SELECT.
COMMANDS = (
    *("exists", "get", "hdel", "hexists", "hget", "hgetall", "hincrby", "hkeys", "hmget", "hset", "hsetnx", "publish"),
    *("set", "time", "unlink", "xadd", "xlen", "xrange", "zadd", "zcard", "zcount", "zrange"),
    *("xrevrange", "zrangebyscore", "zrem", "zremrangebyscore", "zrevrange", "zscore", "info"),
    *("eval", "evalsha", "subscribe", "unsubscribe", "wait"),
    *("ping", "select"),
    # Commands of the release before this one, which runs beside it during a rollout.
    *("sadd", "sismember"),
)


def acl_rights(deployment: str) -> list[str]:
    """Return the rights of a deployment's user for an ACL line, without its name and password."""
    keys = Keys(deployment)
    rights = [f"~{keys.prefix}*", "resetchannels", f"&{keys.single('news')}", "-@all"]
    return [*rights, *(f"+{command}" for command in COMMANDS)]


def acl_lines(deployment: str, user: str, secret: str) -> list[str]:
    """Return the lines of an ACL file: the default user, off, and a deployment's user.

    Args: secret: `>PASSWORD` or its digest.
    """
    return [_DEFAULT_USER, " ".join(["user", user, "on", secret, *acl_rights(deployment)])]


def password_digest(password_file: Path) -> str:
    """Return a password as an ACL file holds it. Raises: OSError."""
    return "#" + hashlib.sha256(read_secret(password_file).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LocalAccess:
    """The one user of a Redis of our own. Only this account of the machine can read the file with its password."""

    password_file: Path
    acl_file: Path

    @classmethod
    def prepare(cls, folder: Path, deployment: str) -> "LocalAccess":
        """Write both files. The password is drawn once and stays with the folder.

        The default user is off. Users that somebody else added to the file stay, so that people can inspect the Redis.
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
        """Name the files of a Redis in `folder`."""
        return cls(folder / "password", folder / "users.acl")

    @property
    def password(self) -> str:
        return read_secret(self.password_file)


def read_secret(path: Path) -> str:
    """Return the password in a file. Raises: OSError."""
    # Editors and `kubectl create secret` leave a newline at the end.
    return path.read_text().strip()


def _write_privately(path: Path, text: str) -> None:
    """Write the whole file or nothing. Others can never read it, not even for a moment."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
