"""Entry of the operator: settings, logging, the watches, and the workers that reconcile the resources they name.

If the settings name a Lease, the watches and the workers begin when the operator holds it, and end with it
(leadership.py).
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import cast

from kubernetes import client, config
from kubernetes.config import ConfigException

from orca.core.domain.errors import SettingError
from orca.core.process.internal_port import HEALTH, InternalPort, Page
from orca.core.process.logs import Format, configure_logging
from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.cluster.api_server import Cluster, Leases
from orca.operator.cluster.known_latencies import KnownLatencies
from orca.operator.cluster.leadership import Leadership
from orca.operator.cluster.watches import Watches
from orca.operator.cluster.watching import Key, ResourceLists
from orca.operator.cluster.work_queue import WorkQueue
from orca.operator.domain.api_refusals import Refusals
from orca.operator.domain.resource import BadSpec, read
from orca.operator.metrics import OperatorMetrics
from orca.operator.ownership import Owners
from orca.operator.reconcile import SOON_S, observe, reconcile, refuse, with_pool
from orca.operator.settings import OperatorSettings, parse_settings

log = logging.getLogger("orca.operator")

RETRY_FIRST_S, RETRY_MAX_S = 1.0, 60.0
FORBIDDEN = 403
"""Status of a call that the operator has no right to."""
DEAF_AFTER_S = 60.0
"""Health turns bad if the API server has not answered a list for this long, and for the time of four lists."""


def main(argv: Sequence[str] | None = None) -> int:
    """Operate until SIGTERM or SIGINT.

    Args: argv: flags without the program's name; None takes those of the process.
    Returns: exit status; 0 after a signal, 1 if there is no cluster or the Lease is lost, 2 for a bad setting.
    """
    try:
        settings = parse_settings(sys.argv[1:] if argv is None else argv, os.environ)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging("operator", fmt=cast(Format, settings.log_format), level=settings.log_level.upper())
    # kopf's own lines about each event add nothing to those of the reconciles.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # It warns in each thread but the main one that it takes no signals there (watches.py).
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    configuration = client.Configuration()
    try:
        config.load_config(client_configuration=configuration)  # type: ignore[no-untyped-call, unused-ignore]
    except ConfigException as error:
        print(f"cannot find the cluster's address and credentials: {error}", file=sys.stderr)
        return 1
    # A failed reconcile is made again. Each retry of the library itself could take the whole bound of the call.
    configuration.retries = 0
    return operate(settings, client.ApiClient(configuration))


def operate(settings: OperatorSettings, api: client.ApiClient) -> int:
    """Operate, by a Lease if the settings name one. Returns: exit status."""
    terms = settings.lease_terms
    if terms is None:
        return asyncio.run(Operator(settings, Cluster(api)).run())
    leadership = Leadership(Leases(api, call_s=terms.call_s), terms)
    try:
        return asyncio.run(Operator(settings, Cluster(api, write_s=leadership.write_s), leadership).run())
    finally:
        # The loop has waited for its threads, so no write is on its way.
        leadership.release()


def set_on_signals(end: asyncio.Event) -> None:
    """Set an event on SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)


class Operator:
    """Watches and regular lists name resources, and the workers reconcile them."""

    def __init__(self, settings: OperatorSettings, cluster: Cluster, leadership: Leadership | None = None) -> None:
        self._settings = settings
        self._cluster = cluster
        self._leadership = leadership
        self._queue: WorkQueue[Key] = WorkQueue()
        self._failures: dict[Key, int] = {}
        self._refusals = Refusals(time.monotonic)
        self._latencies = KnownLatencies(time.monotonic)
        self._owners = Owners(settings.identity, time.monotonic, time.time)
        self._lists = ResourceLists(
            cluster, settings.namespaces, resync_s=settings.resync_seconds, clock=time.monotonic
        )
        self._listed_s = time.monotonic()
        self._refused: Mapping[str, str] = {}
        self._metrics = OperatorMetrics(
            lambda: len(self._queue),
            self._heard_age_s,
            self._is_leader,
            lambda: len(self._refused),
            lambda: self._owners.left,
        )
        self._watches = Watches(
            lambda namespace, name: self._queue.add((namespace, name)), self._metrics.watch_failures.inc
        )

    async def run(self) -> int:
        """Run until SIGTERM, SIGINT, cancellation, or the loss of the Lease. Returns: exit status."""
        end = asyncio.Event()
        set_on_signals(end)
        port = await InternalPort.open(self._settings.listen, {"/metrics": self._metrics.page, "/health": self._health})
        log.info("operator", extra={"address": port.address, "namespaces": self._settings.namespaces or "all"})
        try:
            if self._leadership is None:
                await self._operate(end)
                return 0
            return await self._operate_while_held(self._leadership, end)
        finally:
            port.close()

    async def _operate_while_held(self, leadership: Leadership, end: asyncio.Event) -> int:
        """Wait for the Lease, then work until the event or its loss. Returns: exit status; 1 if it is lost."""
        holding = asyncio.create_task(leadership.hold())
        holding.add_done_callback(lambda _: end.set())
        waiting = [asyncio.create_task(event.wait()) for event in (leadership.taken, end)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if not end.is_set():
            log.info("holds the Lease")
            await self._operate(end)
        if holding.done():
            holding.result()
            log.error("the Lease is lost: this operator ends")
            return 1
        holding.cancel()
        return 0

    async def _operate(self, end: asyncio.Event) -> None:
        """Watch and reconcile until the event."""
        self._listed_s = time.monotonic()
        ending = asyncio.create_task(end.wait())
        tasks = [asyncio.create_task(self._queue.work(self._reconcile)) for _ in range(self._settings.workers)]
        tasks += [asyncio.create_task(each) for each in (self._resync(), self._watches.run())]
        try:
            await asyncio.wait([*tasks, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, ending):
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        # None of them ends by itself, so this is a fault of ours.
        for result in ended:
            if isinstance(result, Exception):
                raise result

    async def _resync(self) -> None:
        """List the resources regularly, and reconcile those that are due."""
        while True:
            try:
                listed = await asyncio.to_thread(self._lists.list)
                self._listed_s = time.monotonic()
                self._note_refused(listed.refused)
                self._watches.serve(listed.served)
                self._refusals.keep(listed.uids)
                self._latencies.keep(listed.uids)
                self._owners.keep(listed.uids)
                if listed.due:
                    self._metrics.plans.keep(set(listed.due))
                for key in listed.due:
                    await self._queue.add(key)
            except ApiServerError as error:
                log.warning("cannot list the OrcaDeployments: %s", error)
            await asyncio.sleep(self._lists.every_s)

    def _note_refused(self, refused: Mapping[str, str]) -> None:
        """Log which namespaces are not served any more, and which are again."""
        for namespace in refused.keys() - self._refused.keys():
            log.warning("the namespace %s is not served: %s", namespace, refused[namespace])
        for namespace in self._refused.keys() - refused.keys():
            log.info("the namespace %s is served again", namespace)
        self._refused = refused

    async def _reconcile(self, key: Key) -> None:
        """Reconcile once, and again later after a failure."""
        began_s = time.monotonic()
        result, again_s = "done", None
        try:
            again_s = await self._reconcile_once(key)
            self._failures.pop(key, None)
        except Exception as error:
            # A fault in this resource must not stop the next one.
            result = "unreachable" if isinstance(error, ApiServerError) else "failed"
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(failures - 1, 10))
            log.log(
                logging.WARNING if isinstance(error, ApiServerError) else logging.ERROR,
                "%s/%s: %s",
                *key,
                error,
                exc_info=None if isinstance(error, ApiServerError) else error,
            )
        self._metrics.reconciles.labels(result).inc()
        self._metrics.seconds.observe(time.monotonic() - began_s)
        if again_s is not None:
            self._queue.add_later(key, again_s)

    async def _reconcile_once(self, key: Key) -> float | None:
        """Returns: seconds until the next reconcile; None leaves it to events."""
        try:
            body = await asyncio.to_thread(self._cluster.deployment, *key)
        except ApiServerError as error:
            if error.status != FORBIDDEN:
                raise
            # Its namespace is not served any more. The lists name it again when it is.
            body = None
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._queue.forget(key)
            self._failures.pop(key, None)
            self._metrics.plans.forget(*key)
            return None
        try:
            settled = await asyncio.to_thread(self._owners.settle, self._cluster, body)
            if settled.body is None:
                self._metrics.plans.forget(*key)
                return settled.again_s
            body = settled.body
            deployment = read(body)
        except BadSpec as error:
            await asyncio.to_thread(refuse, self._cluster, body, "BadSpec", str(error))
            return None
        release, lost_nodes = self._settings.release, self._lists.lost_nodes
        try:
            observation = await asyncio.to_thread(observe, self._cluster, release, deployment, lost_nodes)
        except ApiServerError as error:
            if error.is_refusal:
                await asyncio.to_thread(refuse, self._cluster, body, "Refused", str(error))
            raise
        complete = await with_pool(observation, self._latencies)
        before = body.get("status", {})
        self._metrics.plans.note(*key, before)
        is_moving = await asyncio.to_thread(reconcile, self._cluster, complete, before, self._refusals)
        return SOON_S if is_moving else None

    def _health(self) -> Page:
        if self._heard_age_s() < max(DEAF_AFTER_S, 4 * self._lists.every_s):
            return HEALTH
        return Page(b'{"status":"the API server has not answered for too long"}', status=503)

    def _heard_age_s(self) -> float:
        if self._leadership is not None and not self._leadership.taken.is_set():
            return self._leadership.heard_age_s()
        return time.monotonic() - self._listed_s

    def _is_leader(self) -> bool:
        return self._leadership is None or self._leadership.is_held


if __name__ == "__main__":
    sys.exit(main())
