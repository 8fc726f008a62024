"""The work queue decides which resources are reconciled, how often, and by how many workers."""

import asyncio

from orca.operator.cluster.work_queue import WorkQueue
from support.waiting import until


class RecordingWorkers:
    """Workers that record their keys, and hold each until the test releases it."""

    def __init__(self, workers: int = 1) -> None:
        self.queue: WorkQueue[str] = WorkQueue()
        self.begun: list[str] = []
        self.held = asyncio.Event()
        self._tasks = [asyncio.create_task(self.queue.work(self._process)) for _ in range(workers)]

    async def _process(self, key: str) -> None:
        self.begun.append(key)
        await self.held.wait()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_a_key_added_several_times_is_processed_once() -> None:
    recording = RecordingWorkers()
    await recording.queue.add("a")
    await until(lambda: recording.begun == ["a"], 5)
    for _ in range(10):
        await recording.queue.add("b")
    recording.held.set()
    await until(lambda: recording.begun == ["a", "b"], 5)
    await recording.end()


async def test_a_key_added_during_its_processing_is_processed_again_but_not_concurrently() -> None:
    recording = RecordingWorkers(workers=2)
    await recording.queue.add("a")
    await until(lambda: recording.begun == ["a"], 5)
    await recording.queue.add("a")
    await recording.queue.add("b")
    await until(lambda: recording.begun == ["a", "b"], 5)
    recording.held.set()
    await until(lambda: recording.begun == ["a", "b", "a"], 5)
    await recording.end()


async def test_a_delayed_reconcile_comes_by_itself_and_only_the_last_delay_counts() -> None:
    recording = RecordingWorkers()
    recording.held.set()
    recording.queue.add_later("a", 3600)
    recording.queue.add_later("a", 0.01)
    await until(lambda: recording.begun == ["a"], 5)
    recording.queue.add_later("b", 0.01)
    recording.queue.add_later("b", 3600)
    recording.queue.add_later("c", 0.1)
    await until(lambda: recording.begun == ["a", "c"], 5)
    await recording.end()


async def test_a_forgotten_key_is_not_processed() -> None:
    recording = RecordingWorkers()
    recording.held.set()
    recording.queue.add_later("a", 0.01)
    recording.queue.forget("a")
    recording.queue.add_later("b", 0.02)
    await until(lambda: recording.begun, 5)
    assert recording.begun == ["b"]
    await recording.end()
