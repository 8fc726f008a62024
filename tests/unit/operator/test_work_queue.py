"""Which resources are looked at, how often, and by how many at a time."""

import asyncio

from orca.operator.cluster.work_queue import WorkQueue
from support.waiting import until


class Looks:
    """Workers that note what they were given, and hold it until they are let go."""

    def __init__(self, workers: int = 1) -> None:
        self.queue: WorkQueue[str] = WorkQueue()
        self.begun: list[str] = []
        self.held = asyncio.Event()
        self._tasks = [asyncio.create_task(self.queue.work(self._look)) for _ in range(workers)]

    async def _look(self, key: str) -> None:
        self.begun.append(key)
        await self.held.wait()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_a_key_added_several_times_is_processed_once() -> None:
    looks = Looks()
    await looks.queue.add("a")
    await until(lambda: looks.begun == ["a"], 5)
    for _ in range(10):
        await looks.queue.add("b")
    looks.held.set()
    await until(lambda: looks.begun == ["a", "b"], 5)
    await looks.end()


async def test_a_key_added_during_its_processing_is_processed_again_but_not_concurrently() -> None:
    looks = Looks(workers=2)
    await looks.queue.add("a")
    await until(lambda: looks.begun == ["a"], 5)
    await looks.queue.add("a")
    await looks.queue.add("b")
    await until(lambda: looks.begun == ["a", "b"], 5)
    looks.held.set()
    await until(lambda: looks.begun == ["a", "b", "a"], 5)
    await looks.end()


async def test_a_delayed_reconcile_comes_by_itself_and_only_the_last_delay_counts() -> None:
    looks = Looks()
    looks.held.set()
    looks.queue.add_later("a", 3600)
    looks.queue.add_later("a", 0.01)
    await until(lambda: looks.begun == ["a"], 5)
    looks.queue.add_later("b", 0.01)
    looks.queue.add_later("b", 3600)
    looks.queue.add_later("c", 0.1)
    await until(lambda: looks.begun == ["a", "c"], 5)
    await looks.end()


async def test_a_forgotten_key_is_not_processed() -> None:
    looks = Looks()
    looks.held.set()
    looks.queue.add_later("a", 0.01)
    looks.queue.forget("a")
    looks.queue.add_later("b", 0.02)
    await until(lambda: looks.begun, 5)
    assert looks.begun == ["b"]
    await looks.end()
