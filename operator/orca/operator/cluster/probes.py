"""Calls to what runs for a deployment: poll its pool and its running fetch, and set the promise of the pool.

The pool promises a number of slots to each request, and refuses requests that need more. Only the operator changes that
promise, when the spec gives another number. A fetch reports its progress over HTTP, so polling it needs no rights in
the cluster.
"""

import asyncio
import base64
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from redis.exceptions import RedisError

from orca.core.domain.errors import OrcaError, PoolUnavailable, SettingError
from orca.core.fetch_report import PROGRESS_PAGE, FetchProgress, read_progress
from orca.operator.domain import names
from orca.operator.domain.actions import PromiseSlots
from orca.operator.domain.objects import is_going
from orca.operator.domain.observation import PoolStatus
from orca.operator.domain.resource import Json, OrcaDeployment
from orca.operator.render import fetch, pool
from orca.pool.api import RequestPool
from orca.pool.records import LargerRequests
from orca.pool.redis.pool import RedisPool
from orca.pool.schemas import SCHEMAS
from orca.pool.settings import PoolSettings

CALL_MS = 2_000
"""Bound on one call to the pool."""
FETCH_S = 2.0
"""Bound on the answer of a fetch."""


class UnusablePoolSecret(OrcaError):
    """The Secret does not lead to a pool. The message says why."""


class PromiseChanged(OrcaError):
    """The pool promises something else than when it was polled."""


def poll_fetch(pods: Iterable[Json], port: int = fetch.PORT) -> FetchProgress | None:
    """Return the figures of the fetch that runs; None if none runs, or if it does not answer.

    Args: pods: of fetches.
    """
    for pod in pods:
        status = pod.get("status", {})
        if status.get("phase") == "Running" and status.get("podIP") and not is_going(pod):
            return _read_progress(status["podIP"], port)
    return None


def _read_progress(host: str, port: int) -> FetchProgress | None:
    connection = HTTPConnection(host, port, timeout=FETCH_S)
    try:
        connection.request("GET", PROGRESS_PAGE)
        return read_progress(connection.getresponse().read())
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


async def poll_pool(
    deployment: OrcaDeployment,
    secret: Json | None,
    larger_than: int | None,
    *,
    results: Sequence[str] = (),
    counts_answers: bool = False,
    reads_latencies: bool = False,
    url: str | None = None,
) -> PoolStatus:
    """Ask the pool for its counts, on a connection of its own.

    Args:
        secret: as the API server gives it; None if there is none.
        larger_than: slots; ask also which requests need more, for which the pool checks each request. None does not.
        results: keys of Jobs whose results are read.
        counts_answers: ask also how many answers of the model in force have been counted.
        reads_latencies: ask also how long these answers took.
        url: of the Redis to ask, with the login in the Secret; None asks the one that the Secret names.
    """
    try:
        async with _connected(deployment, secret, url) as pool:
            status = await _with_results(pool, await _read_status(pool, larger_than), results, counts_answers)
            return await _with_latencies(pool, status) if reads_latencies else status
    except OrcaError as error:
        return PoolStatus(problem=str(error))


def set_promise(
    deployment: OrcaDeployment, secret: Json | None, promise: PromiseSlots, *, within_s: Callable[[], float]
) -> None:
    """Set the promise of the pool. For a thread without an event loop.

    Args:
        secret: as in `poll_pool`.
        within_s: called right before the write: seconds that it may take; 0 if it must not be sent.
    Raises: OrcaError. The promise may have been set in spite of it, except after PromiseChanged.
    """

    async def write() -> int | None:
        async with _connected(deployment, secret) as pool:
            bound_s = within_s()
            if bound_s <= 0:
                raise PoolUnavailable("not sent, since this operator does not hold the Lease")
            try:
                async with asyncio.timeout(bound_s):
                    return await pool.set_promise(promise.revision, promise.slots, expected=promise.expected)
            except TimeoutError as error:
                raise PoolUnavailable(f"no answer within {bound_s:.1f} s") from error

    in_force = asyncio.run(write())
    if in_force != promise.slots:
        raise PromiseChanged(f"the promise to a request was {promise.expected} slots, and is {in_force} by now")


@contextlib.asynccontextmanager
async def _connected(
    deployment: OrcaDeployment, secret: Json | None, other_url: str | None = None
) -> AsyncIterator[RedisPool]:
    """Connect to the pool.

    Args: other_url: of an external pool; None takes the one in the Secret.
    Raises: UnusablePoolSecret, SettingError; PoolUnavailable also for an answer of Redis that the pool does not know.
    """
    external = deployment.spec.pool.external
    name = names.pool(deployment.name) if external is None else external.url_secret.name
    if secret is None:
        raise UnusablePoolSecret(f"there is no Secret {name}")
    used = {*pool.LOGIN_FILES, "user"} | (set() if external is None else {external.url_secret.key})
    data = (secret.get("data") or {}).items()
    try:
        values = {key: base64.b64decode(value).decode() for key, value in data if key in used}
    except ValueError as error:
        raise UnusablePoolSecret(f"the Secret {name} holds a value that is not text") from error
    if external is None:
        values["user"] = pool.USER
    url = other_url or f"redis://{name}.{deployment.namespace}.svc:{pool.PORT}/0"
    if external is not None and other_url is None:
        if external.url_secret.key not in values:
            raise UnusablePoolSecret(f"the Secret {name} has no key {external.url_secret.key}")
        url = values[external.url_secret.key].strip()
    with tempfile.TemporaryDirectory(prefix="orca-pool-") as folder:
        try:
            replicas = 0 if external is None else external.min_replicas
            found = RedisPool(url, pool.key_prefix(deployment), _settings(values, Path(folder), replicas))
        except SettingError as error:
            raise UnusablePoolSecret(f"the Secret {name}: {error}") from error
        except ValueError as error:
            raise UnusablePoolSecret(str(error)) from error
        if external is not None and other_url is None and pool.external_url(deployment, secret) is None:
            # Parts are not started with such a URL (plan/plan.py), although this process may reach it.
            raise UnusablePoolSecret(f"the Secret {name} must have a URL like redis://host:6379 or rediss://host:6379")
        try:
            yield found
        except RedisError as error:
            # The pool takes such a reply for a fault of its scripts. Here it may come from a Redis that is not a pool.
            raise PoolUnavailable(f"{type(error).__name__}: {error}") from error
        finally:
            await found.close()


async def _read_status(pool: RequestPool, larger_than: int | None) -> PoolStatus:
    """Raises: OrcaError."""
    stats = await pool.stats()
    larger = LargerRequests(promised_slots=stats.promised_slots, unfinished=0, smallest=0, largest=0)
    if larger_than is not None and stats.revision is not None:
        larger = await pool.larger_requests(stats.revision, larger_than)
    return PoolStatus(
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
        older_schema=stats.schema if stats.schema < SCHEMAS.newest else None,
        deadlines=None if stats.revision is None else await pool.deadline_counts(stats.revision),
    )


async def _with_results(pool: RequestPool, status: PoolStatus, keys: Sequence[str], counts_answers: bool) -> PoolStatus:
    """Return the status with what plans for spec.slo need of the pool. Raises: OrcaError."""
    found = {key: await pool.result(key) for key in keys}
    answers = None
    if counts_answers:
        answers = 0 if status.revision is None else (await pool.lengths(status.revision)).answers
    results = {key: result for key, result in found.items() if result is not None}
    return replace(status, counted_answers=answers, results=results)


async def _with_latencies(pool: RequestPool, status: PoolStatus) -> PoolStatus:
    """Return the status with the latencies of the model in force, if there is one. Raises: OrcaError."""
    return status if status.revision is None else replace(status, latencies=await pool.latencies(status.revision))


def _settings(values: Mapping[str, str], folder: Path, replicas: int) -> PoolSettings:
    """Write login and certificates into files, as the pool takes them, in a folder of this process alone."""

    def file(key: str) -> str | None:
        if key not in values:
            return None
        path = folder / key
        path.write_text(values[key])
        return str(path)

    settings = PoolSettings(
        password_file=file("password"),
        tls_ca_file=file("ca.crt"),
        tls_certificate_file=file("tls.crt"),
        tls_key_file=file("tls.key"),
        call_timeout_ms=CALL_MS,
        replicas=replicas,
    )
    return replace(settings, user=values["user"]) if "user" in values else settings
