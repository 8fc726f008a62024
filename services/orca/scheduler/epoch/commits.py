"""Brings the tokens of the commit queue to the pool, one call at a time. Steps never wait for it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from orca.pool.records import CommitAnswer, CommitEntry
from orca.scheduler.dependencies import Dependencies
from orca.scheduler.epoch.commit_queue import CommitQueue
from orca.scheduler.policy.batch import GroupRequest

log = logging.getLogger("orca.scheduler")


class Committer:
    """The commits of one epoch: `run` is a task of it."""

    def __init__(
        self,
        dependencies: Dependencies,
        commit_queue: CommitQueue,
        *,
        settle: Callable[[GroupRequest, CommitEntry, CommitAnswer], None],
        interval_s: Callable[[], float],
        epoch: int,
    ) -> None:
        """
        Args:
            settle: called with each committed entry and the pool's answer.
            interval_s: returns, at each commit, the time to the next commit of tokens that are not urgent.
            epoch: for the log.
        """
        self._dependencies = dependencies
        self._commit_queue = commit_queue
        self._settle = settle
        self._interval_s = interval_s
        self._epoch = epoch
        self._has_news = asyncio.Event()  # an entry came into the queue, or the queue is to be flushed
        self._due_s = 0.0  # time of the loop's clock at which tokens that are not urgent are committed
        self._is_flushing = False  # everything is committed now
        self._is_flushed = asyncio.Event()  # the queue is empty and no commit is in progress
        self._is_flushed.set()

    def wake(self) -> None:
        """Check the queue again: it may have new entries."""
        if self._commit_queue:
            self._is_flushed.clear()
            self._has_news.set()

    async def run(self) -> None:
        """Commit until cancelled."""
        has_committed = False
        while True:
            if not self._commit_queue:
                await self._until_news()
            is_due = await self._until_due()
            if entries := self._commit_queue.take(is_all=is_due):
                answers = await self._commit(entries)
                if not has_committed and CommitAnswer.APPLIED in answers:
                    has_committed = True
                    log.info("first commit", extra={"epoch": self._epoch})
            if not self._commit_queue:
                self._is_flushed.set()

    async def _until_news(self) -> None:
        self._has_news.clear()
        await self._has_news.wait()

    async def _until_due(self) -> bool:
        """Wait until everything is due, or an entry is urgent. Returns: True if everything is due."""
        clock = asyncio.get_running_loop().time
        wait_s = self._due_s - clock()
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not (self._is_flushing or self._commit_queue.is_urgent):
                        await self._until_news()
                return self._is_flushing
        self._due_s = clock() + self._interval_s()
        return True

    async def flush(self) -> None:
        """Commit everything now, and wait until the pool has it, at most for `flush_s`."""
        self._is_flushing = True
        self._has_news.set()
        try:
            async with asyncio.timeout(self._dependencies.timings.flush_s):
                await self._is_flushed.wait()
        except TimeoutError:
            log.warning("the pool did not answer the commit of the last tokens in time", extra={"epoch": self._epoch})

    async def _commit(self, entries: dict[GroupRequest, CommitEntry]) -> list[CommitAnswer]:
        answers = await self._dependencies.call_pool(lambda pool: pool.commit(list(entries.values())))
        self._dependencies.observer.answered(answers)
        for (request, entry), answer in zip(entries.items(), answers, strict=True):
            self._settle(request, entry, answer)
        return answers
