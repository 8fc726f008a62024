"""Watches of each served namespace apart, so that one namespace's trouble stays its own.

kopf ends all of its watches if one of them is refused, as in a namespace that is deleted with its Role. So each
namespace has a kopf of its own. It runs in a thread with its own event loop, since kopf cancels foreign tasks of its
loop when it ends. If the watches of a namespace fail, they begin again after a while. Meanwhile the regular lists
(watching.py) still find what has changed there.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from time import monotonic

import kopf

from orca.operator.cluster.watching import OnChange, make_registry, make_settings

log = logging.getLogger("orca.operator")

AGAIN_FIRST_S, AGAIN_MAX_S = 1.0, 60.0
STABLE_S = 150.0
"""Watches that lasted this long were well. A refused watch takes kopf a minute of retries."""

Namespace = str | None
"""None stands for the whole cluster."""


class Watches:
    """The watches of the served namespaces: `serve` names them, `run` keeps them going until it is cancelled."""

    def __init__(self, on_change: OnChange, on_failure: Callable[[], None]) -> None:
        """Args: on_change: called on the loop of `run`. on_failure: called each time that watches fail or just end."""
        self._on_change = on_change
        self._on_failure = on_failure
        self._served: frozenset[Namespace] = frozenset()
        self._news = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()  # the loop itself holds its tasks only weakly

    def serve(self, namespaces: Collection[Namespace]) -> None:
        """Watch these namespaces from now on, and no others."""
        self._served = frozenset(namespaces)
        self._news.set()

    async def run(self) -> None:
        """Begin and end watches as `serve` says."""
        tasks: dict[Namespace, asyncio.Task[None]] = {}
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                for namespace in tasks.keys() - self._served:
                    await _end(tasks.pop(namespace))
                for namespace in self._served - tasks.keys():
                    tasks[namespace] = asyncio.create_task(self._keep(namespace))
        finally:
            await _end(*tasks.values())

    async def _keep(self, namespace: Namespace) -> None:
        """Watch one namespace; begin again after each end, less and less often. Watches that are well do not end."""
        wait_s = AGAIN_FIRST_S
        where = "the cluster" if namespace is None else f"the namespace {namespace}"
        while True:
            began_s, found = monotonic(), "they ended without an error"
            try:
                await _watch_in_thread(namespace, self._begin_call)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if monotonic() - began_s > STABLE_S:
                wait_s = AGAIN_FIRST_S
            log.warning("the watches of %s have failed, and begin again in %.0f s: %s", where, wait_s, found)
            self._on_failure()
            await asyncio.sleep(wait_s)
            wait_s = min(AGAIN_MAX_S, 2 * wait_s)

    def _begin_call(self, namespace: str, name: str) -> None:
        call = asyncio.create_task(_call(self._on_change, namespace, name))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _watch_in_thread(namespace: Namespace, begin_call: Callable[[str, str], None]) -> None:
    """Watch until cancelled.

    Args: begin_call: called on this loop with namespace and name of what may have changed.
    Raises: the exception that ended the watches.
    """
    loop, stop = asyncio.get_running_loop(), threading.Event()
    ended: asyncio.Future[Exception | None] = loop.create_future()

    async def on_change_here(namespace: str, name: str) -> None:
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(begin_call, namespace, name)

    def run() -> None:
        found: Exception | None = None
        try:
            asyncio.run(_watch(namespace, on_change_here, stop))
        except Exception as error:
            found = error
        finally:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set_result, found)

    threading.Thread(target=run, name=f"watches of {namespace or 'the cluster'}", daemon=True).start()
    try:
        # Shielded, so that a cancelled wait can still wait for the end of the thread.
        failure = await asyncio.shield(ended)
    finally:
        stop.set()
        if not ended.done():
            await ended
    if failure is not None:
        raise failure


async def _call(on_change: OnChange, namespace: str, name: str) -> None:
    await on_change(namespace, name)


async def _watch(namespace: Namespace, on_change: OnChange, stop: threading.Event) -> None:
    """Run kopf until the event. Raises: the exception that ended it before."""
    stopping = asyncio.create_task(asyncio.to_thread(stop.wait))
    try:
        others = asyncio.all_tasks()
        roots = await kopf.spawn_tasks(
            registry=make_registry(on_change),
            settings=make_settings(is_namespaced=namespace is not None),
            namespaces=() if namespace is None else (namespace,),
            clusterwide=namespace is None,
            standalone=True,
        )
        watching = asyncio.create_task(kopf.run_tasks(roots, ignored=others))
        await asyncio.wait([watching, stopping], return_when=asyncio.FIRST_COMPLETED)
        # kopf would go on for seconds after a flag of its own. If it is cancelled, it ends at once.
        watching.cancel()
        stop.set()
        [ended, _] = await asyncio.gather(watching, stopping, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended
    finally:
        # Otherwise the loop would never end: it waits for the thread that waits for the event.
        stop.set()
