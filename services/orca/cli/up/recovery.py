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
        self._dead: list[ProcessSpec] = []
        self._began = 0.0
        self._has_dead = asyncio.Event()

    def note_death(self, spec: ProcessSpec) -> None:
        """To be called at once, before the process is started again."""
        if not self._has_dead.is_set():
            self._began = time.monotonic()
            self._has_dead.set()
        self._dead.append(spec)

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._has_dead.wait()
            await self._recover()
            self._has_dead.clear()
            self._tell(f"ready again after {time.monotonic() - self._began:.1f} s")

    async def _recover(self) -> None:
        specs = [child.spec for child in self._children]
        older_epochs: dict[str, int] = {}
        while self._dead:
            dead, self._dead = self._dead, []
            # The stages that lived on still say that they are joined, to the epoch that broke with the dead one.
            groups = {spec.name if spec.role is Role.SCHEDULER else spec.scheduler for spec in dead} - {None}
            older_epochs |= await epochs_of([spec for spec in specs if spec.scheduler in groups])
            # Restarts have no event to wait for.
            while any(child.pid is None for child in self._children):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            await wait_until_ready(specs, lambda _name, _standing: None, older_epochs=older_epochs)
