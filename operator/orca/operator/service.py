"""Entry of the operator: settings, logging, the watches, and the workers that look at what they name.

Where a Lease is named, all of that begins only when it is held, and ends with it (leadership.py).
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import kopf
from kubernetes import client, config
from kubernetes.config import ConfigException

from orca.core.domain.errors import SettingError
from orca.core.process.internal_port import HEALTH, InternalPort, Page
from orca.core.process.logs import Format, configure_logging
from orca.operator.cluster.api_server import ApiError, Cluster
from orca.operator.cluster.handlers import make_registry, make_settings
from orca.operator.cluster.leadership import Leadership
from orca.operator.cluster.listing import Key, Listing
from orca.operator.cluster.pool_probe import look
from orca.operator.cluster.work_queue import WorkQueue
from orca.operator.domain.api_refusals import Refusals
from orca.operator.domain.resource import BadSpec, read
from orca.operator.metrics import Metrics
from orca.operator.plan.slots_change import slots_that_some_exceed
from orca.operator.reconcile import SOON_S, observe, reconcile, refuse
from orca.operator.settings import Settings, parse_settings

log = logging.getLogger("orca.operator")

RETRY_FIRST_S, RETRY_MAX_S = 1.0, 60.0
DEAF_AFTER_S = 60.0
"""Health is bad when the API server has not been heard for so long, and for the time of four lists."""


def main(argv: Sequence[str] | None = None) -> int:
    """Operate until SIGTERM or SIGINT.

    Args: argv: flags without the program's name; those of the process when None.
    Returns: exit status; 0 after a signal, 1 when there is no cluster or the Lease is lost, 2 for a bad setting.
    """
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv, os.environ)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging("operator", fmt=cast(Format, settings.log_format), level=settings.log_level.upper())
    # Its own lines about each event tell nothing that a look does not.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    configuration = client.Configuration()
    try:
        config.load_config(client_configuration=configuration)
    except ConfigException as error:
        print(f"no cluster to operate in: {error}", file=sys.stderr)
        return 1
    # A look that fails is made again. Tries of the library itself would each take the whole bound of the call.
    configuration.retries = 0
    return operate(settings, client.ApiClient(configuration))


def operate(settings: Settings, api: client.ApiClient) -> int:
    """Returns: exit status."""
    terms = settings.lease_terms
    if terms is None:
        return asyncio.run(Operator(settings, Cluster(api)).run())
    leadership = Leadership(Cluster(api, call_s=terms.call_s), terms)
    try:
        return asyncio.run(Operator(settings, Cluster(api, write_s=leadership.write_s), leadership).run())
    finally:
        # The loop has waited for its threads: nothing is written any more.
        leadership.release()


def take_signals(told_to_end: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)


class Operator:
    """The watches name resources, the workers look at them, and all are looked at now and then."""

    def __init__(self, settings: Settings, cluster: Cluster, leadership: Leadership | None = None) -> None:
        self._settings = settings
        self._cluster = cluster
        self._leadership = leadership
        self._queue: WorkQueue[Key] = WorkQueue()
        self._failures: dict[Key, int] = {}
        self._refusals = Refusals(time.monotonic)
        self._listing = Listing(cluster, settings.namespaces, resync_s=settings.resync_seconds, clock=time.monotonic)
        self._listed_s = time.monotonic()
        self._metrics = Metrics(lambda: len(self._queue), self._heard_age_s, self._is_leader)

    async def run(self) -> int:
        """Until SIGTERM, SIGINT, cancelled, or without the Lease. Returns: exit status."""
        told_to_end = asyncio.Event()
        take_signals(told_to_end)
        port = await InternalPort.open(self._settings.listen, {"/metrics": self._metrics.page, "/health": self._health})
        log.info("operator", extra={"address": port.address, "namespaces": self._settings.namespaces or "all"})
        try:
            if self._leadership is None:
                await self._operate(told_to_end)
                return 0
            return await self._operate_while_held(self._leadership, told_to_end)
        finally:
            port.close()

    async def _operate_while_held(self, leadership: Leadership, told_to_end: asyncio.Event) -> int:
        """Returns: exit status; 1 when the Lease is lost."""
        holding = asyncio.create_task(leadership.hold())
        holding.add_done_callback(lambda _: told_to_end.set())
        waiting = [asyncio.create_task(event.wait()) for event in (leadership.taken, told_to_end)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if not told_to_end.is_set():
            log.info("leads")
            await self._operate(told_to_end)
        if holding.done():
            holding.result()
            log.error("the Lease is lost, so this operator ends")
            return 1
        holding.cancel()
        return 0

    async def _operate(self, told_to_end: asyncio.Event) -> None:
        """Watch and work until the event."""
        self._listed_s = time.monotonic()
        ending = asyncio.create_task(told_to_end.wait())
        tasks = [asyncio.create_task(self._queue.work(self._look)) for _ in range(self._settings.workers)]
        tasks.append(asyncio.create_task(self._resync()))
        not_of_kopf = asyncio.all_tasks()
        namespaces = self._settings.namespaces
        watches = await kopf.spawn_tasks(
            registry=make_registry(lambda namespace, name: self._queue.add((namespace, name))),
            settings=make_settings(is_namespaced=bool(namespaces)),
            namespaces=namespaces,
            clusterwide=not namespaces,
            standalone=True,
        )
        # kopf has taken the signals, and would go on for five seconds after one; cancelled, it ends at once.
        take_signals(told_to_end)
        watching = asyncio.create_task(kopf.run_tasks(watches, ignored=not_of_kopf))
        try:
            await asyncio.wait([watching, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks += [watching, ending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not watching.cancelled():
            watching.result()

    async def _resync(self) -> None:
        """What a dead watch has missed is found here."""
        while True:
            try:
                listed = await asyncio.to_thread(self._listing.list)
                self._listed_s = time.monotonic()
                self._refusals.keep(listed.uids)
                for key in listed.due:
                    await self._queue.add(key)
            except ApiError as error:
                log.warning("the resources cannot be listed: %s", error)
            await asyncio.sleep(self._listing.every_s)

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
        try:
            deployment = read(body)
        except BadSpec as error:
            await asyncio.to_thread(refuse, self._cluster, body, "BadSpec", str(error))
            return None
        try:
            observed = await asyncio.to_thread(observe, self._cluster, deployment, self._listing.lost_nodes)
        except ApiError as error:
            if error.is_refusal:
                await asyncio.to_thread(refuse, self._cluster, body, "Refused", str(error))
            raise
        larger_than = slots_that_some_exceed(deployment, observed)
        observed = replace(observed, pool=await look(deployment, observed.pool_secret, larger_than))
        before = body.get("status", {})
        is_moving = await asyncio.to_thread(
            reconcile, self._cluster, self._settings.release, deployment, observed, before, self._refusals
        )
        return SOON_S if is_moving else None

    def _health(self) -> Page:
        if self._heard_age_s() < max(DEAF_AFTER_S, 4 * self._listing.every_s):
            return HEALTH
        return Page(b'{"status":"the API server has not been heard for too long"}', status=503)

    def _heard_age_s(self) -> float:
        if self._leadership is not None and not self._leadership.taken.is_set():
            return self._leadership.heard_age_s()
        return time.monotonic() - self._listed_s

    def _is_leader(self) -> bool:
        return self._leadership is None or self._leadership.is_held


if __name__ == "__main__":
    sys.exit(main())
