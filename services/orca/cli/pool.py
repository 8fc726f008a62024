"""`orca pool`: what an operator asks of a pool, and the one thing he may tell it.

    orca pool stats                what is in it
    orca pool schema 2             put another schema number in force; without a number: which one is
    orca pool acl                  lines for the ACL file of an external Redis (pool/redis/access.py)

A schema number is raised or lowered by a person and never by a part: only he knows that the release before is gone.
"""

import asyncio
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from orca.cli.up.places import default_data_folder
from orca.cli.up.plan import DEPLOYMENT
from orca.core.domain.errors import PoolUnavailable, SettingError
from orca.core.process.settings import check_bounds, read_settings, setting
from orca.pool.api import RequestPool
from orca.pool.redis.access import DEFAULT_USER_WARNING, LOCAL_USER, LocalAccess, acl_lines, password_digest
from orca.pool.redis.pool import open_redis_pool
from orca.pool.settings import PoolSettings, parse_pool_settings

ACTIONS = ("stats", "schema", "acl")
_USAGE = "orca pool stats|schema [N]|acl [OPTIONS]; --help lists the options"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which pool is meant."""

    pool: str | None = setting(
        None, "URL of its Redis, with the same ORCA_POOL_ variables as its parts; unset is that of `orca up`"
    )
    deployment: str = setting(DEPLOYMENT, "word that keeps this deployment's keys apart in one Redis")
    data: str | None = setting(None, "data folder of `orca up`, where `pool` is unset; unset is that of --port 8000")

    def __post_init__(self) -> None:
        check_bounds(self)


def main(argv: Sequence[str]) -> int:
    """Returns: 0; 1 when the pool does not answer or refuses. Raises: SettingError for a mistake of the caller."""
    action, number, flags = _split(argv)
    settings = read_settings(Settings, flags, {}, prefix="", prog="orca pool", description=_USAGE)
    if action == "acl":
        _show_acl(settings.deployment, parse_pool_settings(os.environ))
        return 0
    try:
        print(asyncio.run(_ask(settings, action, number)))
    except PoolUnavailable as error:
        print(f"orca pool: the pool does not answer: {error}", file=sys.stderr)
        return 1
    except _Refused as error:
        print(f"orca pool: {error}", file=sys.stderr)
        return 1
    return 0


def _show_acl(deployment: str, pool_settings: PoolSettings) -> None:
    """The lines go to stdout, so that they can be written into the file as they are.

    Raises: SettingError for a name that no deployment has, and when there is a password file and it cannot be read.
    """
    file, user = pool_settings.password_file, pool_settings.user
    try:
        secret = ">PASSWORD" if file is None else password_digest(Path(file))
    except OSError as error:
        raise SettingError(f"ORCA_POOL_PASSWORD_FILE {file}: {error.strerror}") from error
    try:
        lines = acl_lines(deployment, LOCAL_USER if user == "default" else user, secret)
    except ValueError as error:
        raise SettingError(f"setting --deployment: {error}") from error
    print("\n".join(lines))
    print(DEFAULT_USER_WARNING, file=sys.stderr)


class _Refused(Exception):
    """The pool answered no."""


def _split(argv: Sequence[str]) -> tuple[str, int | None, list[str]]:
    """The action, its number where it has one, and the flags behind them."""
    if argv and argv[0] in ("-h", "--help"):
        return "stats", None, ["--help"]
    if not argv or argv[0] not in ACTIONS:
        raise SettingError(f"say what to do: {_USAGE}")
    action, *flags = argv
    if action != "schema" or not flags or flags[0].startswith("-"):
        return action, None, flags
    if not flags[0].isdecimal():
        raise SettingError(f"schema {flags[0]!r} is not a number")
    return action, int(flags[0]), flags[1:]


async def _ask(settings: Settings, action: str, number: int | None) -> str:
    url, pool_settings = _place(settings)
    pool = await open_redis_pool(url, settings.deployment, pool_settings)
    try:
        if action == "stats":
            values = dataclasses.asdict(await pool.stats())
            return "\n".join(f"{name:<24} {_shown(value)}" for name, value in values.items())
        return await _schema(pool, number)
    finally:
        await pool.close()


def _place(settings: Settings) -> tuple[str, PoolSettings]:
    """URL and login: as told, or as `orca up` left them in its data folder."""
    pool_settings = parse_pool_settings(os.environ)
    if settings.pool is not None:
        return settings.pool, pool_settings
    folder = (Path(settings.data).expanduser() if settings.data else default_data_folder(8000)).resolve() / "redis"
    access = LocalAccess.at(folder)
    if not access.password_file.exists():
        raise SettingError(f"{folder} is of no `orca up`; name one with --data, or a Redis with --pool")
    login = dataclasses.replace(pool_settings, user=LOCAL_USER, password_file=str(access.password_file))
    return f"unix://{folder / 'redis.sock'}", login


async def _schema(pool: RequestPool, number: int | None) -> str:
    before = await pool.stats()
    if number is None:
        return f"schema {before.schema} is in force; {before.newer_records} requests have newer records"
    in_force = await pool.set_schema(number)
    if in_force != number:
        raise _Refused(
            f"schema {in_force} stays in force: this release or a part that lives cannot read and write {number}"
        )
    left = (await pool.stats()).newer_records
    behind = f"; {left} requests have newer records, an older release may start when none has" if left else ""
    return f"schema {number} is in force, before it was {before.schema}{behind}"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
