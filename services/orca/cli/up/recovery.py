"""Tells when the system serves again after one of its processes died, or one of its groups broke up."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from orca.cli.up.readiness import POLL_S, epochs_of, wait_until_ready
from orca.cli.up.spec import ProcessSpec, Role
from orca.cli.up.supervisor import Supervised


class Recovery:
    """Deaths and breaks in, one sentence out when everything is up again. Several that overlap are one recovery."""

    def __init__(self, children: Sequence[Supervised], tell: Callable[[str], None]) -> None:
        self._children = children
        self._tell = tell
        self._began = 0.0
        self._is_needed = asyncio.Event()
        self._dead: set[str] = set()  # names of processes that died
        # The stages that lived on say for a moment that they are joined, to the epoch that broke.
        self._broken_epochs: dict[str, int] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def note_death(self, spec: ProcessSpec) -> None:
        """To be called at once, before the process is started again."""
        self._dead.add(spec.name)
        self._begin()
        # Now: by the time that an earlier death is dealt with the next epoch may have been formed.
        self._ask(self._note_epochs_of(spec.name if spec.role is Role.SCHEDULER else spec.scheduler))

    def note_break(self, scheduler: str, epoch: int) -> None:
        """An epoch of this scheduler's group is over. Where no process of ours died it was a rank, or a link."""
        self._ask(self._note_over(scheduler, epoch))

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._is_needed.wait()
            await self._recover()
            self._is_needed.clear()
            self._broken_epochs.clear()
            restarted = [child for child in self._children if child.spec.name in self._dead]
            self._dead.clear()
            pids = "".join(f", {child.spec.name} is pid {child.pid}" for child in restarted)
            self._tell(f"ready again after {time.monotonic() - self._began:.1f} s{pids}")

    def _begin(self) -> None:
        if not self._is_needed.is_set():
            self._began = time.monotonic()
            self._is_needed.set()

    def _ask(self, question: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(question)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _note_epochs_of(self, scheduler: str | None) -> None:
        self._broken_epochs |= await epochs_of(self._stages_of(scheduler))

    async def _note_over(self, scheduler: str, epoch: int) -> None:
        """Nothing, if it comes late: the next epoch has been formed, and who broke this one has been told."""
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
            # Restarts have no event to wait for.
            while not self._are_all_there():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            await wait_until_ready(specs, lambda _name, _standing: None, older_epochs=self._broken_epochs)
            is_over = self._are_all_there()

    def _are_all_there(self) -> bool:
        return not self._asking and all(child.pid is not None for child in self._children)
