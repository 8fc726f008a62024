"""The results of `orca profile`, `orca plan` and `orca follow`, as Jobs of the operator: they leave them in the pool.

The pod of such a Job has no rights in the cluster. The operator reads the result where it polls the pool anyway.
"""

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from orca.core.domain.errors import BadValue, SettingError
from orca.core.job_files import to_body
from orca.core.process.settings import setting
from orca.pool.api import RequestPool
from orca.pool.contract import RESULT_BYTES_MAX
from orca.pool.settings import parse_pool_settings

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResultSettings:
    """The options of a command that may run as a Job of the operator."""

    pool: str | None = setting(
        None,
        "URL of the Redis of a pool, such as redis://10.0.0.5:6379/0; ORCA_POOL_USER and ORCA_POOL_PASSWORD_FILE are as"
        " for the parts of Orca",
    )
    deployment: str = setting("orca", "name of the deployment, which separates its keys from others in one Redis")
    result_key: str | None = setting(
        None, "key under which the pool keeps the result for an hour, for the operator's Jobs; unset: it keeps none"
    )

    def __post_init__(self) -> None:
        if self.result_key is not None:
            if self.pool is None:
                raise BadValue("result_key", "needs a pool: give --pool")
            if self.result_key.split() != [self.result_key]:
                raise BadValue("result_key", f"{self.result_key!r} is not a word")


def keep_result(settings: ResultSettings, files: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Leave the files in the pool, if the settings name a key.

    Args: environment: has the login of the pool.
    Raises: PoolUnavailable; SettingError if they are too large.
    """
    key = settings.result_key
    if key is None:
        return
    body = to_body(files)
    if len(body) > RESULT_BYTES_MAX:
        raise SettingError(f"setting result_key: the result has {len(body)} bytes, more than {RESULT_BYTES_MAX}")
    with_pool(settings, environment, lambda pool: pool.keep_result(key, body))


def result_folder(text: str, name: str) -> Path:
    """Return a folder for results, which is made if it is missing.

    Args: name: of the setting with the folder.
    Raises: SettingError that names it, if files could not be written to the folder: better now than after the search.
    """
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"setting {name}: {folder} is no folder: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise SettingError(f"setting {name}: files cannot be written to the folder {folder}")
    return folder


def with_pool(
    settings: ResultSettings, environment: Mapping[str, str], use: Callable[[RequestPool], Awaitable[Answer]]
) -> Answer:
    """Return what a use of the pool returns. Raises: PoolUnavailable; SettingError for a URL or a login of no pool."""

    async def connected() -> Answer:
        # The import takes 0.1 s, and most calls need no pool.
        from orca.pool.redis.pool import open_redis_pool

        assert settings.pool is not None
        pool = await open_redis_pool(settings.pool, settings.deployment, parse_pool_settings(environment))
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(connected())
