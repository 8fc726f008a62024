"""Runs the pool's Redis as a supervised process: pool.redis.embedded starts it, this module watches and restarts it."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from orca.cli.up.health_checks import is_redis_answering
from orca.cli.up.spec import ProcessSpec, Role
from orca.pool.redis.access import LOCAL_USER, LocalAccess
from orca.pool.redis.embedded import EmbeddedRedis, RedisDidNotStart


class RedisChild:
    """A Redis with its data in one folder, so that a restart loses nothing that was acknowledged.

    Redis ends with the thread that starts it: construct and run this object on the main thread.
    """

    def __init__(self, folder: Path, deployment: str, *, fsync: str) -> None:
        """Start Redis and wait until it answers. Raises: SettingError with the message of Redis when it does not.

        Redis has no maxmemory: the pool bounds what it accepts, and a commit that is refused for lack of memory would
        not help.
        """
        folder.mkdir(parents=True, exist_ok=True)
        access = LocalAccess.prepare(folder, deployment)
        self._redis = EmbeddedRedis(folder, fsync=fsync, access=access)
        # The path of the password, not the password itself: child processes inherit variables, and logs may show them.
        self.login = {"ORCA_POOL_USER": LOCAL_USER, "ORCA_POOL_PASSWORD_FILE": str(access.password_file)}
        self.spec = ProcessSpec(
            role=Role.REDIS, name="redis", command=(), address=self._redis.url, log=folder / "redis.log"
        )
        self._is_running = True
        self._is_up = True

    @property
    def url(self) -> str:
        return self._redis.url

    @property
    def pid(self) -> int | None:
        """The process id; None while Redis does not run or loads its data."""
        return self._redis.pid if self._is_up else None

    async def run_once(self) -> int:
        """Start Redis unless it runs, and wait for its end. Returns: the exit code; negative for a signal."""
        if not self._is_running:
            self._redis.launch()
            self._is_running = True
            try:
                # In a thread: Redis may load for minutes, and the other processes need their supervisor meanwhile.
                await asyncio.to_thread(self._redis.wait_until_up)
            except RedisDidNotStart as error:
                # It was killed while it started, or its disk is full. Count one more crash; its log has the reason.
                self._is_running = False
                return error.exit_code
            self._is_up = True
        await _wait_for_exit(self._redis.pid)
        self._is_running = self._is_up = False
        return _exit_code(self._redis.pid)

    async def stop(self) -> None:
        if self._is_running:
            await asyncio.to_thread(self._redis.stop)

    def signal(self, number: signal.Signals) -> None:
        if self._is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._redis.pid, number)

    async def is_answering(self, within_s: float) -> bool:
        return await is_redis_answering(self._redis.url.removeprefix("unix://"), within_s)

    def unfreeze(self) -> str:
        """Resume Redis, which is harmless. A kill is not: on a slow disk, acknowledged data may still be in memory."""
        self.signal(signal.SIGCONT)
        return "it may hold data that is not on disk yet, so it is not killed but resumed (SIGCONT)"


def _exit_code(pid: int) -> int:
    """Return the exit code of a child that has exited. WNOWAIT leaves the child to its owner, EmbeddedRedis."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        # The child was stopped, and its owner has collected it already.
        return 0
    if ended is None:
        return 0
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


async def _wait_for_exit(pid: int) -> None:
    exited = asyncio.Event()
    handle = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
