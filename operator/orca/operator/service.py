"""Entry of the operator: settings, logging, the watches, and the workers that look at what they name."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import cast

import kopf
from kubernetes import client, config
from kubernetes.config import ConfigException

from orca.core.errors import SettingError
from orca.core.internal_port import HEALTH, InternalPort, Page
from orca.core.logs import Format, configure_logging
from orca.operator.cluster import ApiError, Cluster
from orca.operator.handlers import make_registry, make_settings
from orca.operator.metrics import Metrics
from orca.operator.observed import PoolLook
from orca.operator.pool_look import look, secret_name
from orca.operator.reconcile import SOON_S, lost_nodes, reconcile
from orca.operator.resource import BadSpec, Json, read
from orca.operator.settings import Settings, parse_settings
from orca.operator.work_queue import WorkQueue

log = logging.getLogger("orca.operator")

Key = tuple[str, str]
"""Namespace and name of an OrcaDeployment."""

RETRY_FIRST_S, RETRY_MAX_S = 1.0, 60.0
DEAF_AFTER_S = 60.0
"""Health is bad when the API server has not listed the resources for so long, and four times the resync."""


def main(argv: Sequence[str] | None = None) -> int:
    """Operate until SIGTERM or SIGINT.

    Args: argv: flags without the program's name; those of the process when None.
    Returns: exit status; 0 after a signal, 1 when there is no cluster, 2 for a bad setting.
    """
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv, os.environ)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging("operator", fmt=cast(Format, settings.log_format), level=settings.log_level.upper())
    # Its own lines about each event tell nothing that a look does not.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        config.load_config()
    except ConfigException as error:
        print(f"no cluster to operate in: {error}", file=sys.stderr)
        return 1
    asyncio.run(Operator(settings, Cluster(client.ApiClient())).run())
    return 0


class Operator:
    """The watches name resources, the workers look at them, and all are looked at now and then."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._queue: WorkQueue[Key] = WorkQueue()
        self._failures: dict[Key, int] = {}
        self._lost_nodes: frozenset[str] = frozenset()
        self._listed_s = time.monotonic()
        self._metrics = Metrics(lambda: len(self._queue), self._list_age_s)

    async def run(self) -> None:
        """Until SIGTERM, SIGINT, or cancelled."""
        # kopf handles them too, but only once it has begun.
        told_to_end = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)
        port = await InternalPort.open(self._settings.listen, {"/metrics": self._metrics.page, "/health": self._health})
        log.info("operator", extra={"address": port.address, "namespaces": self._settings.namespaces or "all"})
        tasks = [asyncio.create_task(self._queue.work(self._look)) for _ in range(self._settings.workers)]
        tasks.append(asyncio.create_task(self._resync()))
        namespaces = self._settings.namespaces
        try:
            await kopf.operator(
                registry=make_registry(lambda namespace, name: self._queue.add((namespace, name))),
                settings=make_settings(is_namespaced=bool(namespaces)),
                namespaces=namespaces,
                clusterwide=not namespaces,
                standalone=True,
                stop_flag=told_to_end,
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            port.close()

    async def _resync(self) -> None:
        """What a dead watch has missed is found here."""
        while True:
            try:
                found = await asyncio.to_thread(self._cluster.deployments, self._settings.namespaces)
                self._lost_nodes = await asyncio.to_thread(self._find_lost_nodes)
                self._listed_s = time.monotonic()
                for each in found:
                    await self._queue.add((each["metadata"]["namespace"], each["metadata"]["name"]))
            except ApiError as error:
                log.warning("the resources cannot be listed: %s", error)
            await asyncio.sleep(self._settings.resync_seconds)

    def _find_lost_nodes(self) -> frozenset[str]:
        if self._settings.namespaces:
            return frozenset()
        return lost_nodes(self._cluster.nodes())

    async def _look(self, key: Key) -> None:
        """One look, whatever comes of it."""
        began_s = time.monotonic()
        result, again_s = "done", None
        try:
            again_s = await self._look_once(key)
            self._failures.pop(key, None)
        except Exception as error:
            # The next resource must not wait for what is wrong with this one.
            result = "unreachable" if isinstance(error, ApiError) else "failed"
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(failures - 1, 10))
            log.log(
                logging.WARNING if isinstance(error, ApiError) else logging.ERROR,
                "%s/%s: %s",
                *key,
                error,
                exc_info=None if isinstance(error, ApiError) else error,
            )
        self._metrics.looks.labels(result).inc()
        self._metrics.seconds.observe(time.monotonic() - began_s)
        if again_s is not None:
            self._queue.add_later(key, again_s)

    async def _look_once(self, key: Key) -> float | None:
        """Returns: seconds until the next look; None leaves it to events."""
        body = await asyncio.to_thread(self._cluster.deployment, *key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._queue.forget(key)
            self._failures.pop(key, None)
            return None
        pool = await self._look_at_pool(body)
        is_moving = await asyncio.to_thread(
            reconcile, self._cluster, self._settings.release, body, pool, self._lost_nodes
        )
        return SOON_S if is_moving else None

    async def _look_at_pool(self, body: Json) -> PoolLook:
        try:
            deployment = read(body)
        except BadSpec:
            return PoolLook(problem="the resource is refused")
        secret = await asyncio.to_thread(self._cluster.secret, deployment.namespace, secret_name(deployment))
        return await look(deployment, secret)

    def _health(self) -> Page:
        if self._list_age_s() < max(DEAF_AFTER_S, 4 * self._settings.resync_seconds):
            return HEALTH
        return Page(b'{"status":"the API server has not been heard for too long"}', status=503)

    def _list_age_s(self) -> float:
        return time.monotonic() - self._listed_s


if __name__ == "__main__":
    sys.exit(main())
