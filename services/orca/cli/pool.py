"""`orca pool`: shows the state of a request pool and sets its schema number.

    orca pool stats                print what the pool holds
    orca pool lengths              print how long prompts and answers were in the last hours
    orca pool latencies            print how long answers took, and how many ended per second
    orca pool schema 2             put another schema number in force; without a number, print the present one
    orca pool acl                  print lines for the ACL file of an external Redis (pool/redis/access.py)

A person raises or lowers the schema number, never a part: only a person knows that the previous release is gone.
"""

import asyncio
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from orca.cli.pool_latencies import latencies_json, latencies_text
from orca.cli.pool_lengths import lengths_json, lengths_text
from orca.cli.up.local_resources import default_data_folder
from orca.cli.up.plan import DEPLOYMENT
from orca.core.domain.errors import PoolUnavailable, SettingError
from orca.core.process.settings import check_bounds, read_settings, setting
from orca.pool.api import RequestPool
from orca.pool.length_bins import HALF_LIFE_S
from orca.pool.order.order_stats import OrderStats
from orca.pool.redis.access import DEFAULT_USER_WARNING, LOCAL_USER, LocalAccess, acl_lines, password_digest
from orca.pool.redis.pool import open_redis_pool
from orca.pool.settings import PoolSettings, parse_pool_settings

ACTIONS = ("stats", "lengths", "latencies", "schema", "acl")
_COUNTS = ("lengths", "latencies")
_USAGE = "orca pool stats|lengths|latencies|schema [N]|acl [OPTIONS]; --help lists the options"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolCommandSettings:
    """Selects the pool."""

    pool: str | None = setting(
        None, "URL of the pool's Redis; set the same ORCA_POOL_ variables as for its parts; default: that of `orca up`"
    )
    deployment: str = setting(DEPLOYMENT, "name of the deployment, which separates its keys from others in one Redis")
    data: str | None = setting(
        None, "data folder of the `orca up` to ask if --pool is not given; default: the folder of --port 8000"
    )

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolCountsSettings(PoolCommandSettings):
    """Selects the answers, and the form of what is printed about them."""

    revision: str | None = setting(None, "revision whose answers are counted; default: the one in force")
    half_life: int = setting(
        HALF_LIFE_S, "seconds after which an answer has half its weight in means and percentiles", least=1
    )
    json: bool = setting(False, "print JSON, with all ranges of lengths or latencies")


def main(argv: Sequence[str]) -> int:
    """Run one action. Returns: 0, or 1 if the pool does not answer or refuses. Raises: SettingError for a bad call."""
    action, number, flags = _split(argv)
    kind = PoolCountsSettings if action in _COUNTS else PoolCommandSettings
    prog = f"orca pool {action}" if action in _COUNTS else "orca pool"
    settings = read_settings(kind, flags, {}, prefix="", prog=prog, description=_USAGE)
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
    """Print the ACL lines to stdout, so that they can be redirected into the file as they are.

    Raises: SettingError for a name that no deployment can have, or for a password file that cannot be read.
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
    """The pool refused a change, or has nothing to show."""


def _split(argv: Sequence[str]) -> tuple[str, int | None, list[str]]:
    """Return the action, its number or None, and the flags after them."""
    if argv and argv[0] in ("-h", "--help"):
        return "stats", None, ["--help"]
    if not argv or argv[0] not in ACTIONS:
        raise SettingError(f"an action is needed: {_USAGE}")
    action, *flags = argv
    if action != "schema" or not flags or flags[0].startswith("-"):
        return action, None, flags
    if not flags[0].isdecimal():
        raise SettingError(f"schema {flags[0]!r} is not a whole number")
    return action, int(flags[0]), flags[1:]


async def _ask(settings: PoolCommandSettings, action: str, number: int | None) -> str:
    url, pool_settings = _connection(settings)
    pool = await open_redis_pool(url, settings.deployment, pool_settings)
    try:
        if action == "stats":
            stats = await pool.stats()
            names = [field.name for field in dataclasses.fields(stats)]
            return "\n".join(f"{name:<24} {_format(getattr(stats, name))}" for name in names)
        if isinstance(settings, PoolCountsSettings):
            return await _counts(pool, settings, action)
        return await _schema(pool, number)
    finally:
        await pool.close()


def _connection(settings: PoolCommandSettings) -> tuple[str, PoolSettings]:
    """Return the pool's URL and login: from --pool and the variables, or from the data folder of `orca up`."""
    pool_settings = parse_pool_settings(os.environ)
    if settings.pool is not None:
        return settings.pool, pool_settings
    folder = (Path(settings.data).expanduser() if settings.data else default_data_folder(8000)).resolve() / "redis"
    access = LocalAccess.at(folder)
    if not access.password_file.exists():
        raise SettingError(
            f"{folder} is not from `orca up`; give its data folder with --data, or the URL of a Redis with --pool"
        )
    login = dataclasses.replace(pool_settings, user=LOCAL_USER, password_file=str(access.password_file))
    return f"unix://{folder / 'redis.sock'}", login


async def _counts(pool: RequestPool, settings: PoolCountsSettings, action: str) -> str:
    revision = settings.revision or (await pool.stats()).revision
    if revision is None:
        raise _Refused("no model has served from this pool yet, so no revision is in force")
    lengths, latencies = await pool.lengths(revision), await pool.latencies(revision)
    if not lengths.answers:
        raise _Refused(f"no answer of revision {revision} has ended by itself in the last 4 hours")
    if not sum(lengths.weighed(settings.half_life).values()):
        raise _Refused(f"all answers are too old to count with --half-life {settings.half_life}")
    if action == "lengths":
        return (lengths_json if settings.json else lengths_text)(revision, lengths, settings.half_life)
    return (latencies_json if settings.json else latencies_text)(revision, latencies, settings.half_life)


async def _schema(pool: RequestPool, number: int | None) -> str:
    before = await pool.stats()
    if number is None:
        return f"schema {before.schema} is in force; {before.newer_records} requests have newer records"
    in_force = await pool.set_schema(number)
    if in_force != number:
        raise _Refused(
            f"schema {in_force} stays in force: this release or a running part cannot read and write {number}"
        )
    left = (await pool.stats()).newer_records
    note = f"; {left} requests have newer records, an older release can start when none has" if left else ""
    return f"schema {number} is in force, before it was {before.schema}{note}"


def _format(value: object) -> str:
    if isinstance(value, OrderStats):
        value = tuple(f"{of}={count}" for of, count in sorted((value.classes or {}).items()))
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
