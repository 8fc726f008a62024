"""Asks the pool of a deployment what is in it. The operator reads it and never writes."""

import base64
import tempfile
from collections.abc import Mapping
from pathlib import Path

from orca.core.errors import OrcaError
from orca.operator import names
from orca.operator.observed import PoolLook
from orca.operator.render import pool
from orca.operator.resource import Deployment, Json
from orca.pool.redis_pool import RedisPool
from orca.pool.settings import PoolSettings

CALL_MS = 2_000
_FILES = {"password", "ca.crt", "tls.crt", "tls.key"}
"""Keys of the Secret that reach Redis' client as files."""


def secret_name(deployment: Deployment) -> str:
    """Of the Secret by which the pool is reached."""
    external = deployment.spec.pool.external
    return names.pool(deployment.name) if external is None else external.url_secret.name


async def look(deployment: Deployment, secret: Json | None) -> PoolLook:
    """One question on a connection of its own. Args: secret: as the API server gives it; None when there is none."""
    external, name = deployment.spec.pool.external, secret_name(deployment)
    if secret is None:
        return PoolLook(problem=f"there is no Secret {name}")
    used = _FILES | {"user"} | (set() if external is None else {external.url_secret.key})
    data = (secret.get("data") or {}).items()
    try:
        values = {key: base64.b64decode(value).decode() for key, value in data if key in used}
    except ValueError:
        return PoolLook(problem=f"the Secret {name} holds what is no text")
    url = f"redis://{name}.{deployment.namespace}.svc:{pool.PORT}/0"
    if external is not None:
        if external.url_secret.key not in values:
            return PoolLook(problem=f"the Secret {name} has no key {external.url_secret.key}")
        url = values[external.url_secret.key].strip()
    with tempfile.TemporaryDirectory(prefix="orca-pool-") as folder:
        return await _ask(url, pool.word(deployment), _settings(values, Path(folder)))


async def _ask(url: str, word: str, settings: PoolSettings) -> PoolLook:
    try:
        asked = RedisPool(url, word, settings)
    except ValueError as error:
        return PoolLook(problem=str(error))
    try:
        stats = await asked.stats()
    except OrcaError as error:
        return PoolLook(problem=str(error))
    finally:
        await asked.close()
    return PoolLook(
        queued=stats.queued,
        running=stats.owned,
        oldest_wait_ms=stats.oldest_wait_ms,
        groups_formed=frozenset(stats.groups_formed),
    )


def _settings(values: Mapping[str, str], folder: Path) -> PoolSettings:
    """Login and certificates as files, which is how the pool takes them, in a folder of this process alone."""

    def file(key: str) -> str | None:
        if key not in values:
            return None
        path = folder / key
        path.write_text(values[key])
        return str(path)

    return PoolSettings(
        user=values.get("user", pool.USER),
        password_file=file("password"),
        tls_ca_file=file("ca.crt"),
        tls_certificate_file=file("tls.crt"),
        tls_key_file=file("tls.key"),
        call_timeout_ms=CALL_MS,
    )
