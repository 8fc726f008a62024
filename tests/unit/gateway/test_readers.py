"""Reader entries of open connections: renewed in time however slow the pool is, and taken out once."""

import asyncio

import pytest

from orca.core.domain.errors import PoolUnavailable
from orca.gateway.answer.readers import Readers
from orca.scheduler.engines import virtual_time
from support.gateway.gateway_rig import until


class FakeEntries:
    """Renews, sweeps and detaches, noting what came."""

    def __init__(self) -> None:
        self.renewed: list[list[tuple[str, str]]] = []
        self.sweeps = 0
        self.detached: list[tuple[str, str]] = []
        self.fails_with: Exception | None = None

    async def renew(self, readers: list[tuple[str, str]]) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        self.renewed.append(sorted(readers))

    async def sweep(self) -> None:
        self.sweeps += 1

    async def detach(self, parent: str, reader: str) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        self.detached.append((parent, reader))


async def test_one_call_per_round_renews_all_readers_and_the_round_sweeps() -> None:
    entries = FakeEntries()
    readers = Readers(entries, 0.01, lease_s=0.03)  # type: ignore[arg-type]
    task = asyncio.create_task(readers.run())
    readers.add("a", "1")
    readers.add("b", "2")
    await until(lambda: entries.renewed and entries.sweeps > 2)
    assert entries.renewed[-1] == [("a", "1"), ("b", "2")]
    readers.remove("a", "1")
    await until(lambda: entries.renewed[-1] == [("b", "2")] and entries.detached == [("a", "1")])
    task.cancel()


@pytest.mark.parametrize("error", [PoolUnavailable("away"), ZeroDivisionError()])
async def test_rounds_continue_after_a_failure(error: Exception) -> None:
    entries = FakeEntries()
    entries.fails_with = error
    readers = Readers(entries, 0.01, lease_s=0.03)  # type: ignore[arg-type]
    task = asyncio.create_task(readers.run())
    readers.add("a", "1")
    await asyncio.sleep(0)
    entries.fails_with = None
    await until(lambda: entries.renewed)
    task.cancel()


async def test_a_detach_that_fails_is_left_to_the_lease() -> None:
    entries = FakeEntries()
    entries.fails_with = PoolUnavailable("away")
    readers = Readers(entries, 0.01, lease_s=0.03)  # type: ignore[arg-type]
    readers.add("a", "1")
    readers.remove("a", "1")
    await readers.settle()
    assert entries.detached == []


class Calls(FakeEntries):
    """Takes its time, and fails when it is told to."""

    def __init__(self, lease_s: float) -> None:
        super().__init__()
        self.ends: dict[tuple[str, str], float] = {}
        self.lease_s, self.renew_s, self.sweep_s = lease_s, 0.0, 0.0
        self.fails = False
        self.lapsed: set[tuple[str, str]] = set()

    async def renew(self, readers: list[tuple[str, str]]) -> None:
        await asyncio.sleep(self.renew_s)
        if self.fails:
            raise PoolUnavailable("away")
        now = asyncio.get_running_loop().time()
        for reader in readers:
            if self.ends[reader] < now:
                self.lapsed.add(reader)
            self.ends[reader] = now + self.lease_s
        await super().renew(readers)

    async def sweep(self) -> None:
        await asyncio.sleep(self.sweep_s)
        await super().sweep()


@pytest.mark.parametrize(
    ("renew_s", "sweep_s", "fails_s"), [(0.0, 0.0, 0.0), (0.05, 4.0, 0.0), (1.0, 1.0, 0.0), (0.0, 0.0, 2.0)], ids=str
)
def test_no_reader_entry_expires_while_the_pool_is_slow(renew_s: float, sweep_s: float, fails_s: float) -> None:
    async def lived() -> None:
        entries = Calls(lease_s=5.0)
        readers = Readers(entries, 0.5, lease_s=5.0)  # type: ignore[arg-type]
        entries.renew_s, entries.sweep_s = renew_s, sweep_s
        task = asyncio.create_task(readers.run())
        for number in range(40):
            readers.add(str(number), "1")
            entries.ends[str(number), "1"] = asyncio.get_running_loop().time() + entries.lease_s
            await asyncio.sleep(0.05)
        for _ in range(10):
            entries.fails = fails_s > 0
            await asyncio.sleep(fails_s)
            entries.fails = False
            await asyncio.sleep(3.0)
        task.cancel()
        now = asyncio.get_running_loop().time()
        assert entries.lapsed == set()
        assert min(entries.ends.values()) > now
        assert renew_s or fails_s or len(entries.renewed) <= 64 // 0.5, "a call a round at most"
        calls = sum(map(len, entries.renewed)) / 40
        assert fails_s or calls <= 32.0 / (5.0 / 3 - 0.5), "three times a lease, not each round"

    virtual_time.run(lived())


async def test_an_entry_that_is_left_to_expire_is_neither_removed_nor_renewed() -> None:
    entries = FakeEntries()
    readers = Readers(entries, 0.01, lease_s=0.03)  # type: ignore[arg-type]
    readers.add("a", "1")
    readers.remove("a", "1", lapses=True)
    await readers.settle()
    assert entries.detached == []
    task = asyncio.create_task(readers.run())
    await until(lambda: entries.sweeps > 2)
    task.cancel()
    assert entries.renewed == []
