"""The rank processes of a stage: started, checked for liveness, and replaced when they die."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from orca.core.domain.errors import EngineError, ModelError, OrcaError
from orca.worker.controller.failure_cause import FailureCause
from orca.worker.controller.liveness import AwakeClock, liveness_failure
from orca.worker.controller.rank_process import RankProcess
from orca.worker.messages.frames import LoadReport
from orca.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

_STOP_GRACE_S = 3.0
_LOADS_FAILED_MAX = 3
"""Ranks that die while they load, in a row, before the controller gives up and lets its supervisor decide."""
_RELOAD_PAUSE_S = 0.5
"""Pause before a rank that died while it loaded is started again; it doubles with each death in a row."""
_LIVENESS_EVERY_S = 0.25


class StageRanks:
    """All ranks of a stage."""

    def __init__(
        self,
        settings: WorkerSettings,
        rank_command: Sequence[str],
        on_result: Callable[[bytes], None],
        on_broken: Callable[[int, str, FailureCause], None],
        on_failure: Callable[[str, FailureCause], None],
    ) -> None:
        """
        Args:
            on_result, on_broken: as those of RankProcess.
            on_failure: gets the reason why the present epoch cannot go on, and the cause.
        """
        self.processes: list[RankProcess] = []  # in order of ranks; a rank that is started again is missing
        self.hopeless: asyncio.Future[OrcaError] = asyncio.get_running_loop().create_future()
        """Set to an error when this stage can never serve, or its ranks keep dying."""
        self._settings = settings
        self._rank_command = rank_command
        self._on_result = on_result
        self._on_broken = on_broken
        self._on_failure = on_failure
        self._clock = AwakeClock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads_failed = 0

    @property
    def loaded(self) -> list[LoadReport]:
        """The reports of the ranks that have their weights: fewer than `tensor` while one loads or is started again."""
        return [rank.state.loaded for rank in self.processes if rank.state.loaded is not None]

    async def start(self) -> None:
        """Start all ranks, and check their liveness from now on. Raises: OSError if a process cannot be started."""
        for rank in range(self._settings.tensor):
            await self._start_rank(rank)
        self._spawn(self._check_liveness())

    async def close(self) -> None:
        """Stop all ranks."""
        for task in [*self._tasks]:
            task.cancel()
        processes, self.processes = self.processes, []
        await asyncio.gather(*(rank.stop(_STOP_GRACE_S) for rank in processes))

    def send(self, frame: bytes) -> None:
        """Send a frame to every rank."""
        for rank in self.processes:
            rank.send(frame)

    async def renew(self) -> None:
        """Start ranks again that have been in a group, as NCCL requires; they find their weights in the page cache."""
        used = [rank for rank in self.processes if rank.has_joined]

        async def replace_used() -> None:
            # First they leave the list, so that their death is no failure. Then they die, so that the device has memory
            # for the new ones.
            self.processes = [rank for rank in self.processes if rank not in used]
            await asyncio.gather(*(rank.kill() for rank in used))
            await self._replace(used)

        # The replacement goes on if this join is given up meanwhile: nobody else would start the missing ranks.
        await asyncio.shield(self._spawn(replace_used()))
        await asyncio.gather(*(rank.state.loaded_event.wait() for rank in self.processes))

    def _on_death(self, rank: RankProcess, detail: str, cause: FailureCause) -> None:
        if rank not in self.processes:
            return  # it was stopped on purpose
        log.error("a rank died", extra={"rank": rank.rank, "detail": detail, "cause": cause.value})
        self._on_failure(detail, cause)
        if rank.state.refusal is not None:
            self._give_up(ModelError(rank.state.refusal))
            return
        has_loaded = rank.state.loaded_event.is_set()
        self._loads_failed = 0 if has_loaded else self._loads_failed + 1
        if self._loads_failed >= _LOADS_FAILED_MAX:
            times = self._loads_failed
            self._give_up(EngineError(f"{times} times in a row a rank died while it loaded; the last time: {detail}"))
            return
        pause_s = 0.0 if has_loaded else _RELOAD_PAUSE_S * 2 ** (self._loads_failed - 1)
        self._spawn(self._replace([rank], pause_s))

    def _give_up(self, error: OrcaError) -> None:
        if not self.hopeless.done():
            self.hopeless.set_result(error)

    async def _replace(self, dead: Sequence[RankProcess], pause_s: float = 0.0) -> None:
        """Start the ranks of `dead` again, or give up: a stage without all its ranks would load for ever."""
        self.processes = [rank for rank in self.processes if rank not in dead]
        await asyncio.sleep(pause_s)
        try:
            for rank in dead:
                await self._start_rank(rank.rank)
        except OSError as error:
            self._give_up(EngineError(f"a rank could not be started: {error}"))

    async def _start_rank(self, rank: int) -> None:
        process = RankProcess(rank, lambda: self._clock.seconds, self._on_result, self._on_broken, self._on_death)
        await process.start(self._settings, self._rank_command)
        # Without an await in between: the death of a rank that is not in the list counts as intended.
        self.processes = sorted([*self.processes, process], key=lambda each: each.rank)

    async def _check_liveness(self) -> None:
        """Kill each rank that is silent or makes no progress, and end its epoch. Its death starts it again."""
        while True:
            await asyncio.sleep(_LIVENESS_EVERY_S)
            self._clock.advance(time.monotonic())
            for rank in self.processes:
                reason = None if rank.is_being_killed else liveness_failure(rank.state.liveness, self._settings)
                if reason is not None:
                    log.error("a rank is killed", extra={"rank": rank.rank, "pid": rank.pid, "reason": reason})
                    rank.kill_for(reason)
                    self._on_failure(f"rank {rank.rank} {reason}", FailureCause.INSIDE)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Give up after an unexpected error in a task: a hung rank would go unseen, or a dead one never be replaced."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a task of the controller failed", exc_info=error)
        detail = f"the controller failed: {type(error).__name__}: {error}"
        self._on_failure(detail, FailureCause.OUTSIDE)
        self._give_up(EngineError(detail))
