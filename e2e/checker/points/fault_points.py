"""Wraps the calls of a process by name, and carries out the armed action at its call."""

import asyncio
import functools
import json
import os
import pickle
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from pathlib import Path
from typing import Any

import checker.points.names as names
from checker.points.patching import after_import

SERVED = {"orca.worker.controller.controller": "Controller", "orca.scheduler.engines.rendezvous": "RendezvousServer"}
METHODS = ("Status", "Join", "Run", "Set", "Get", "Add")


class Trigger:
    """Compares each call with the armed one."""

    def __init__(self, folder: Path, part: str) -> None:
        self._folder = folder
        self._part = part
        self._calls: Counter[tuple[str, str]] = Counter()  # by the armed order and the call

    def action(self, call: str) -> str | None:
        """Return the action for this call; None for nearly all calls."""
        armed = self._folder / "armed"
        try:
            order = armed.read_text()
        except FileNotFoundError:
            return None
        wanted = json.loads(order)
        if (wanted["part"], wanted["call"]) != (self._part, call):
            return None
        self._calls[order, call] += 1
        if self._calls[order, call] < wanted["nth"]:
            return None
        try:
            armed.rename(self._folder / "fired")
        except FileNotFoundError:
            return None  # another process acted first
        return str(wanted["action"])


class LateCalls:
    """Calls that are repeated after the next join."""

    def __init__(self, folder: Path) -> None:
        self._signal_file = folder / names.CAME_LATE
        self._held: list[Callable[[], Awaitable[Any]]] = []

    def hold(self, call: Callable[[], Awaitable[Any]]) -> None:
        self._held.append(call)

    async def replay(self) -> None:
        """Repeat the calls and ignore their results, because their caller has ended."""
        held, self._held = self._held, []
        for call in held:
            await asyncio.gather(call(), return_exceptions=True)
            self._signal_file.touch()


class HeldCommits:
    """A commit that is on its way when its scheduler dies, stored in a file. Its scheduler never gets the answer."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "commit"
        self._signal_file = folder / names.CAME_LATE

    def hold(self, entries: Sequence[Any]) -> None:
        self._file.write_bytes(pickle.dumps(entries))

    async def replay(self, claimed: Container[str], commit: Callable[[Sequence[Any]], Awaitable[Any]]) -> None:
        """Repeat the stored commit for the requests that another scheduler has just claimed."""
        if not self._file.exists():
            return
        entries = [entry for entry in pickle.loads(self._file.read_bytes()) if entry.request_id in claimed]
        if entries:
            self._file.unlink()
            await commit(entries)
            self._signal_file.touch()


def install(folder: Path, part: str) -> None:
    """Wrap all points of a part."""
    trigger = Trigger(folder, part)
    if part == "scheduler":
        held = HeldCommits(folder)
        after_import("orca.pool.redis.pool", lambda module: _wrap_commits(module.RedisPool, trigger, held))
        if os.environ.get(names.REMOTE_VARIABLE):
            after_import("orca.core.transport.local_link", _open_no_link)
    after_import("orca.pool.redis.link", lambda module: _wrap_redis(module, trigger))
    after_import("orca.core.transport.grpc_links", lambda module: _wrap_stubs(module, trigger))
    late = LateCalls(folder)
    for module_name, class_name in SERVED.items():
        after_import(module_name, lambda module, name=class_name: _wrap_service(getattr(module, name), trigger, late))  # type: ignore[misc]


def _open_no_link(module: Any) -> None:
    """Replace `open_link` of local_link: no stage can be reached by a local socket."""
    assert callable(module.open_link)
    module.open_link = lambda address, epoch: None  # noqa: ARG005


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _at(action: str | None, call: Callable[[], Awaitable[Any]], no_answer: Callable[[], Exception]) -> Any:
    """Make the call, and carry out the action before or after it."""
    if action == names.KILL_BEFORE:
        _die()
    answer = await call()
    if action == names.KILL_AFTER:
        _die()
    if action == names.DROP_REPLY:
        raise no_answer()
    return answer


def _wrap_redis(module: Any, trigger: Trigger) -> None:
    """Wrap the transitions of the pool: for the caller, a lost reply is an outage."""
    run = module.RedisLink.run

    async def wrapped(self: Any, transition: str, *args: Any, **options: Any) -> Any:
        action = trigger.action(f"redis.{transition}")
        lost = lambda: module.PoolUnavailable("the checker dropped the reply")  # noqa: E731
        return await _at(action, lambda: run(self, transition, *args, **options), lost)

    module.RedisLink.run = wrapped


def _wrap_commits(pool: Any, trigger: Trigger, held: HeldCommits) -> None:
    claim, commit = pool.claim, pool.commit

    async def wrapped_claim(self: Any, *args: Any, **options: Any) -> Any:
        answer = await claim(self, *args, **options)
        await held.replay({grant.request.id for grant in answer.claimed}, functools.partial(commit, self))
        return answer

    async def wrapped_commit(self: Any, entries: Sequence[Any]) -> Any:
        if trigger.action("pool.commit") == names.OUTLIVE:
            held.hold(entries)
            _die()
        return await commit(self, entries)

    pool.claim, pool.commit = wrapped_claim, wrapped_commit


def _wrap_service(served: Any, trigger: Trigger, late: LateCalls) -> None:
    """Wrap the server side: a reply that is lost there is a call that the server broke."""
    for name in METHODS:
        if hasattr(served, name):
            setattr(served, name, _served(getattr(served, name), f"serve.{name}", trigger, late))


def _served(method: Any, call: str, trigger: Trigger, late: LateCalls) -> Any:
    async def wrapped(self: Any, request: Any, context: Any) -> Any:
        action = trigger.action(call)
        if action == names.COME_LATE:
            late.hold(lambda: method(self, request, context))
        answer = await _at(action, lambda: method(self, request, context), _unavailable)
        if call == "serve.Join":
            await late.replay()
        return answer

    return wrapped


def _wrap_stubs(module: Any, trigger: Trigger) -> None:
    """Wrap the client side."""
    stage_stub = module.stage_stub
    module.stage_stub = lambda channel: _Stub(stage_stub(channel), trigger)


class _Stub:
    """A stage's stub with points at its calls; other calls go directly to the stub."""

    def __init__(self, stub: Any, trigger: Trigger) -> None:
        self._stub = stub
        self._trigger = trigger

    def __getattr__(self, name: str) -> Any:
        call, trigger = getattr(self._stub, name), self._trigger
        if name == "Results":
            return lambda request: _Stream(call(request), trigger)

        def made(request: Any, **options: Any) -> Any:
            action = trigger.action(f"grpc.{name}")
            if action is None:
                return call(request, **options)
            return asyncio.ensure_future(_at(action, lambda: call(request, **options), _unavailable))

        return made


class _Stream:
    """A result stream that can break at any message."""

    def __init__(self, stream: Any, trigger: Trigger) -> None:
        self._stream = stream
        self._trigger = trigger

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._stream:
            action = self._trigger.action("grpc.Results")
            if action in (names.KILL_BEFORE, names.DROP_REPLY):
                await _at(action, _nothing, _unavailable)
            yield message
            if action == names.KILL_AFTER:
                _die()

    def cancel(self) -> None:
        self._stream.cancel()


async def _nothing() -> None:
    return None


def _unavailable() -> Exception:
    import grpc
    from grpc import aio

    nothing = aio.Metadata()
    error: Exception = aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, nothing, nothing, details="the checker dropped the reply"
    )
    return error
