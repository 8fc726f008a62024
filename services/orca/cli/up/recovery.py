"""Reports when the system serves again after a process died or a group broke up."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from orca.cli.up.readiness import POLL_S, epochs_of, wait_until_ready
from orca.cli.up.spec import ProcessSpec, Role
from orca.cli.up.supervisor import Supervised


class Recovery:
    """Takes note of deaths and broken groups, and prints one sentence when everything is up again.

    Several that overlap count as one recovery.
    """

    def __init__(self, children: Sequence[Supervised], report: Callable[[str], None]) -> None:
        self._children = children
        self._report = report
        self._began = 0.0
        self._is_needed = asyncio.Event()
        self._dead: set[str] = set()  # names of processes that died
        # Stages that survived still report for a moment that they have joined the epoch that broke.
        self._broken_epochs: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def record_death(self, spec: ProcessSpec) -> None:
        """Take note of a death. Call this at once, before the process is started again."""
        self._dead.add(spec.name)
        self._begin()
        # Ask now: by the time that an earlier death is handled, the next epoch may have formed.
        self._start(self._record_epochs_of(spec.name if spec.role is Role.SCHEDULER else spec.scheduler))

    def record_break(self, scheduler: str, epoch: int) -> None:
        """Take note that an epoch of this scheduler's group is over.

        If no process of the supervisor died, the cause is a rank or a link.
        """
        self._start(self._record_epoch_over(scheduler, epoch))

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._is_needed.wait()
            await self._recover()
            self._is_needed.clear()
            self._broken_epochs.clear()
            restarted = [child for child in self._children if child.spec.name in self._dead]
            self._dead.clear()
            pids = "".join(f", {child.spec.name} is pid {child.pid}" for child in restarted)
            self._report(f"ready again after {time.monotonic() - self._began:.1f} s{pids}")

    def _begin(self) -> None:
        if not self._is_needed.is_set():
            self._began = time.monotonic()
            self._is_needed.set()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record_epochs_of(self, scheduler: str | None) -> None:
        self._broken_epochs |= await epochs_of(self._stages_of(scheduler))

    async def _record_epoch_over(self, scheduler: str, epoch: int) -> None:
        """Begin a recovery, unless the next epoch has formed already: then this break has been reported."""
        stages = self._stages_of(scheduler)
        joined = await epochs_of(stages)
        if any(joined.get(stage.name, 0) <= epoch for stage in stages):
            self._broken_epochs |= {stage.name: epoch for stage in stages}
            self._begin()

    def _stages_of(self, scheduler: str | None) -> list[ProcessSpec]:
        return [child.spec for child in self._children if scheduler and child.spec.scheduler == scheduler]

    async def _recover(self) -> None:
        specs = [child.spec for child in self._children]
        is_over = False
        while not is_over:
            # A restart has no event to wait for.
            while not self._are_all_running():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            await wait_until_ready(specs, lambda _name, _status: None, older_epochs=self._broken_epochs)
            is_over = self._are_all_running()

    def _are_all_running(self) -> bool:
        return not self._tasks and all(child.pid is not None for child in self._children)
