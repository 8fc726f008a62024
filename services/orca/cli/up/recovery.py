"""Tells when the system serves again after one of its processes died."""

import asyncio
import time
from collections.abc import Callable, Sequence

from orca.cli.up.readiness import POLL_S, epochs_of, wait_until_ready
from orca.cli.up.spec import ProcessSpec, Role
from orca.cli.up.supervisor import Supervised


class Recovery:
    """Deaths in, one sentence out when everything is up again. Several that overlap are one recovery."""

    def __init__(self, children: Sequence[Supervised], tell: Callable[[str], None]) -> None:
        self._children = children
        self._tell = tell
        self._began = 0.0
        self._has_dead = asyncio.Event()
        # The stages that lived on say for a moment that they are joined, to the epoch that broke with the dead one.
        self._broken_epochs: dict[str, int] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def note_death(self, spec: ProcessSpec) -> None:
        """To be called at once, before the process is started again."""
        if not self._has_dead.is_set():
            self._began = time.monotonic()
            self._has_dead.set()
        # Now: by the time that an earlier death is dealt with the next epoch may have been formed.
        task = asyncio.create_task(self._note_broken_epoch(spec))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._has_dead.wait()
            await self._recover()
            self._has_dead.clear()
            self._broken_epochs.clear()
            self._tell(f"ready again after {time.monotonic() - self._began:.1f} s")

    async def _note_broken_epoch(self, dead: ProcessSpec) -> None:
        scheduler = dead.name if dead.role is Role.SCHEDULER else dead.scheduler
        stages = [child.spec for child in self._children if scheduler and child.spec.scheduler == scheduler]
        self._broken_epochs |= await epochs_of(stages)

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
