"""Asks the pool of a deployment what is in it, and tells it the one thing that is the operator's to say: how many slots
its door promises to a request, when the spec gives another number."""

import asyncio
import base64
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from redis.exceptions import RedisError

from orca.core.domain.errors import OrcaError, PoolUnavailable, SettingError
from orca.operator.domain import names
from orca.operator.domain.actions import Promise
from orca.operator.domain.observed import PoolLook
from orca.operator.domain.resource import Deployment, Json
from orca.operator.render import pool
from orca.pool.api import RequestPool
from orca.pool.records import LargerRequests
from orca.pool.redis.pool import RedisPool
from orca.pool.settings import PoolSettings

CALL_MS = 2_000


class NoPool(OrcaError):
    """The Secret does not lead to a pool; the message says why."""


class StatedElsewhere(OrcaError):
    """The pool promises something else than it did when it was looked at."""


async def look(deployment: Deployment, secret: Json | None, larger_than: int | None) -> PoolLook:
    """Some questions on a connection of their own.

    Args:
        secret: as the API server gives it; None when there is none.
        larger_than: slots; which requests need more is asked. That looks at each of them; None does not ask.
    """
    try:
        async with _connected(deployment, secret) as pool:
            return await _ask(pool, larger_than)
    except OrcaError as error:
        return PoolLook(problem=str(error))


def set_promise(
    deployment: Deployment, secret: Json | None, promise: Promise, *, within_s: Callable[[], float]
) -> None:
    """For a thread without an event loop.

    Args:
        secret: as in `look`.
        within_s: asked when all is ready to tell it: seconds that this may take; 0 when it must not be told.
    Raises: OrcaError; but for StatedElsewhere the pool may have been told all the same.
    """

    async def tell() -> int | None:
        async with _connected(deployment, secret) as pool:
            bound_s = within_s()
            if bound_s <= 0:
                raise PoolUnavailable("not told, as this operator does not hold the Lease")
            try:
                async with asyncio.timeout(bound_s):
                    return await pool.set_promise(promise.revision, promise.slots, expected=promise.expected)
            except TimeoutError as error:
                raise PoolUnavailable(f"no answer within {bound_s:.1f} s") from error

    in_force = asyncio.run(tell())
    if in_force != promise.slots:
        raise StatedElsewhere(f"{promise.expected} slots were promised to a request, and it is {in_force} by now")


@contextlib.asynccontextmanager
async def _connected(deployment: Deployment, secret: Json | None) -> AsyncIterator[RedisPool]:
    """Raises: NoPool, SettingError; PoolUnavailable where Redis says what the pool has no word for."""
    external = deployment.spec.pool.external
    name = names.pool(deployment.name) if external is None else external.url_secret.name
    if secret is None:
        raise NoPool(f"there is no Secret {name}")
    used = {*pool.LOGIN_FILES, "user"} | (set() if external is None else {external.url_secret.key})
    data = (secret.get("data") or {}).items()
    try:
        values = {key: base64.b64decode(value).decode() for key, value in data if key in used}
    except ValueError as error:
        raise NoPool(f"the Secret {name} holds what is no text") from error
    if external is None:
        values["user"] = pool.USER
    url = f"redis://{name}.{deployment.namespace}.svc:{pool.PORT}/0"
    if external is not None:
        if external.url_secret.key not in values:
            raise NoPool(f"the Secret {name} has no key {external.url_secret.key}")
        url = values[external.url_secret.key].strip()
    with tempfile.TemporaryDirectory(prefix="orca-pool-") as folder:
        try:
            replicas = 0 if external is None else external.min_replicas
            found = RedisPool(url, pool.word(deployment), _settings(values, Path(folder), replicas))
        except SettingError as error:
            raise NoPool(f"the Secret {name}: {error}") from error
        except ValueError as error:
            raise NoPool(str(error)) from error
        try:
            yield found
        except RedisError as error:
            # A reply that the pool takes for a fault of its scripts: here it may be of a Redis that is none for us.
            raise PoolUnavailable(f"{type(error).__name__}: {error}") from error
        finally:
            await found.close()


async def _ask(pool: RequestPool, larger_than: int | None) -> PoolLook:
    """Raises: OrcaError."""
    stats = await pool.stats()
    larger = LargerRequests(promised_slots=stats.promised_slots, unfinished=0, smallest=0, largest=0)
    if larger_than is not None and stats.revision is not None:
        larger = await pool.larger_requests(stats.revision, larger_than)
    return PoolLook(
        queued=stats.queued,
        running=stats.owned,
        oldest_wait_ms=stats.oldest_wait_ms,
        generation=stats.generation,
        replaced_revisions=stats.replaced_revisions,
        replaced_unfinished=stats.replaced_unfinished,
        revision=stats.revision,
        promised_slots=larger.promised_slots,
        groups_in_force=stats.groups_in_force,
        offered_slots=stats.offered_slots,
        larger_requests=larger.unfinished,
        smallest_larger_request=larger.smallest,
        largest_request=larger.largest,
    )


def _settings(values: Mapping[str, str], folder: Path, replicas: int) -> PoolSettings:
    """Login and certificates as files, which is how the pool takes them, in a folder of this process alone."""

    def file(key: str) -> str | None:
        if key not in values:
            return None
        path = folder / key
        path.write_text(values[key])
        return str(path)

    user = {"user": values["user"]} if "user" in values else {}
    return PoolSettings(
        **user,
        password_file=file("password"),
        tls_ca_file=file("ca.crt"),
        tls_certificate_file=file("tls.crt"),
        tls_key_file=file("tls.key"),
        call_timeout_ms=CALL_MS,
        replicas=replicas,
    )
