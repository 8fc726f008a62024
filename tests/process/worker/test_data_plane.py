"""worker.parallel.process_groups and scheduler.engines.rendezvous: ranks meet through the scheduler's store, and
tensors arrive as sent."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch
from orca.scheduler.engines.rendezvous import RendezvousServer, key_prefix
from orca.worker.parallel.process_groups import EpochGroups
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.rendezvous_store import RendezvousStore
from orca.worker.parallel.shard import Shard
from orca.worker.parallel.tensor_link import TensorLink

EPOCH = Epoch(4, "scheduler/a")
PREFIX = key_prefix(EPOCH)
SENDS = 20  # more than are held: the last ones wait until the peer takes the first ones


@pytest.fixture
async def rendezvous() -> AsyncIterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1:0")
    await server.start()
    await server.open(EPOCH)
    yield server
    await server.stop()


async def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run blocking calls side by side, as the ranks they stand for."""
    with ThreadPoolExecutor(len(calls)) as pool:
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(asyncio.gather(*(loop.run_in_executor(pool, call) for call in calls)), 30)


async def with_store(
    rendezvous: RendezvousServer, use: Callable[[RendezvousStore], Any], timeout_s: float = 10.0
) -> Any:
    def call() -> Any:
        store = RendezvousStore(rendezvous.address, timeout_s)
        try:
            return use(store)
        finally:
            store.close()

    [answer] = await in_threads(call)
    return answer


async def test_the_store_keeps_what_torch_asks_of_a_store(rendezvous: RendezvousServer) -> None:
    def use(store: RendezvousStore) -> list[Any]:
        store.set(f"{PREFIX}a", b"\x00\xff")
        store.multi_set([f"{PREFIX}b"], ["text"])
        return [
            store.multi_get([f"{PREFIX}a", f"{PREFIX}b"]),
            [store.add(f"{PREFIX}n", amount) for amount in (2, 0, -5)],
            store.get(f"{PREFIX}n"),
            store.compare_set(f"{PREFIX}c", "", "first"),
            store.compare_set(f"{PREFIX}c", "", "second"),
            store.compare_set(f"{PREFIX}c", "first", "second"),
            [store.check([f"{PREFIX}a"]), store.check([f"{PREFIX}a", f"{PREFIX}z"])],
            [store.delete_key(f"{PREFIX}a"), store.delete_key(f"{PREFIX}a")],
        ]

    assert await with_store(rendezvous, use) == [
        [b"\x00\xff", b"text"],
        [2, 2, -3],
        b"-3",
        b"first",
        b"first",
        b"second",
        [True, False],
        [True, False],
    ]


async def test_a_get_waits_until_another_rank_has_set_the_key(rendezvous: RendezvousServer) -> None:
    store = RendezvousStore(rendezvous.address, 10.0)
    waiting = asyncio.ensure_future(in_threads(lambda: store.get(f"{PREFIX}late")))
    await with_store(rendezvous, lambda other: other.set(f"{PREFIX}late", b"here"))
    assert await waiting == [b"here"]
    store.close()


async def test_a_wait_ends_at_its_timeout_and_names_the_key(rendezvous: RendezvousServer) -> None:
    with pytest.raises(EngineError, match=f"nobody set {PREFIX}never"):
        await with_store(rendezvous, lambda store: store.wait([f"{PREFIX}never"], timedelta(seconds=0.05)))


async def test_a_rank_of_an_old_epoch_is_disconnected_even_while_it_waits(rendezvous: RendezvousServer) -> None:
    store = RendezvousStore(rendezvous.address, 10.0)
    waiting = asyncio.ensure_future(in_threads(lambda: store.get(f"{PREFIX}late")))
    await with_store(rendezvous, lambda other: other.set(f"{PREFIX}seen", b""))
    await rendezvous.open(Epoch(5, "scheduler/a"))
    with pytest.raises(EngineError, match="this epoch is over"):
        await waiting
    with pytest.raises(EngineError, match="this epoch is over"):
        await with_store(rendezvous, lambda other: other.set(f"{PREFIX}late", b""))
    store.close()


async def test_closing_the_store_wakes_a_rank_that_waits_in_it(rendezvous: RendezvousServer) -> None:
    store = RendezvousStore(rendezvous.address, 30.0)
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        store.get(f"{PREFIX}never")

    waiting = asyncio.ensure_future(in_threads(wait))
    await asyncio.to_thread(waits.wait)
    store.close()
    with pytest.raises(EngineError):
        await asyncio.wait_for(waiting, 30)


class Peer:
    """A rank's end of the data plane."""

    def __init__(self, address: str, shard: Shard, interface: str | None = None) -> None:
        self.shard = shard
        progress = RankProgress()
        self.store = RendezvousStore(address, 10.0)
        self.tensor = TensorLink(shard.tensor, progress)
        cpu = torch.device("cpu")
        self.groups = EpochGroups(
            shard,
            cpu,
            uses_nccl=False,
            data_host="127.0.0.1",
            interface=interface,
            hidden_size=3,
            dtype=torch.float32,
            progress=progress,
        )

    def form(self, **bounds: float) -> "Peer":
        self.groups.form(self.store, PREFIX, self.tensor, feeds_tokens=True, **({"timeout_s": 10.0} | bounds))
        return self

    def leave(self) -> None:
        self.groups.leave(self.tensor)
        self.store.close()


@pytest.fixture
async def peers(rendezvous: RendezvousServer) -> AsyncIterator[Callable[..., Any]]:
    formed: list[Peer] = []

    async def form(stages: int, tensor: int, *, interface: str | None = None, **bounds: float) -> list[Peer]:
        shards = [
            Shard(stage=stage, stages=stages, rank=rank, tensor=tensor)
            for stage in range(stages)
            for rank in range(tensor)
        ]
        formed.extend(Peer(rendezvous.address, shard, interface) for shard in shards)
        return await in_threads(*(functools.partial(peer.form, **bounds) for peer in formed))

    yield form
    for peer in formed:
        peer.leave()


async def test_activations_go_rank_by_rank_to_the_next_stage_in_the_order_sent(peers: Callable[..., Any]) -> None:
    first0, first1, second0, second1 = await peers(2, 2)
    inbound = [[peer.groups.receive_hidden(2), peer.groups.receive_hidden(1)] for peer in (second0, second1)]
    for value, peer in ((10.0, first0), (20.0, first1)):
        peer.groups.send_hidden(torch.full((2, 3), value))
        peer.groups.send_hidden(torch.full((1, 3), value + 1))
    received = [[each.wait()[0, 0].item() for each in pair] for pair in inbound]
    assert received == [[10.0, 11.0], [20.0, 21.0]]


async def test_tensors_use_the_named_network_interface(peers: Callable[..., Any]) -> None:
    first, second = await peers(2, 1, interface="lo")
    first.groups.send_hidden(torch.full((1, 3), 5.0))
    assert second.groups.receive_hidden(1).wait()[0, 0].item() == 5.0


async def test_a_missing_network_interface_prevents_forming_a_group(peers: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="none0"):
        await peers(1, 2, interface="none0")


async def test_sampled_tokens_reach_every_rank_of_the_first_stage(peers: Callable[..., Any]) -> None:
    first0, first1, sampler, _ = await peers(2, 2)
    sampler.groups.send_device_tokens([7, 2**40])
    assert [peer.groups.receive_device_tokens(2).wait().tolist() for peer in (first0, first1)] == [[7, 2**40]] * 2


async def test_ranks_of_a_stage_add_up_and_join_uneven_shards(peers: Callable[..., Any]) -> None:
    ranks = await peers(1, 3)
    sizes = [2, 1, 3]

    def compute(peer: Peer) -> tuple[Any, Any]:
        rank = peer.shard.rank
        total = peer.tensor.all_reduce(torch.full((2, 2), float(rank + 1)))
        joined = peer.tensor.all_gather_last(torch.full((2, sizes[rank]), float(rank)), sizes)
        return total.tolist(), joined.tolist()

    answers = await in_threads(*(lambda peer=peer: compute(peer) for peer in ranks))
    assert answers == [([[6.0, 6.0]] * 2, [[0.0, 0.0, 1.0, 2.0, 2.0, 2.0]] * 2)] * 3


async def test_more_sends_than_the_buffer_holds_all_arrive(peers: Callable[..., Any]) -> None:
    first, second = await peers(2, 1)
    count = 40

    def send() -> None:
        for number in range(count):
            first.groups.send_hidden(torch.full((1, 3), float(number)))

    def receive() -> list[float]:
        return [second.groups.receive_hidden(1).wait()[0, 0].item() for _ in range(count)]

    _, received = await in_threads(send, receive)
    assert received == [float(number) for number in range(count)]


async def test_a_rank_that_leaves_wakes_a_peer_that_waits_for_it(peers: Callable[..., Any]) -> None:
    first, second = await peers(2, 1)
    inbound = second.groups.receive_hidden(1)
    waiting = asyncio.ensure_future(in_threads(inbound.wait))
    await asyncio.to_thread(first.leave)
    with pytest.raises(RuntimeError):
        await waiting


async def test_a_wait_for_a_peer_may_take_longer_than_the_forming_of_the_groups(peers: Callable[..., Any]) -> None:
    first0, first1, second0, second1 = await peers(2, 2, timeout_s=6.0)
    fed, hidden = first1.groups.receive_device_tokens(1), second0.groups.receive_hidden(1)
    add_up = [functools.partial(peer.tensor.all_reduce, torch.ones(1)) for peer in (first0, first1)]
    waits = asyncio.ensure_future(in_threads(fed.wait, hidden.wait, add_up[0], lambda: send_many(first1)))
    await asyncio.sleep(7.0)  # a long step: past the bound of the forming
    second0.groups.send_device_tokens([7])
    first0.groups.send_hidden(torch.ones(1, 3))
    await in_threads(add_up[1], *[second1.groups.receive_hidden(1).wait for _ in range(SENDS)])
    tokens, activations, total, _ = await waits
    assert (tokens.tolist(), activations.tolist(), total.item()) == ([7], [[1.0] * 3], 2.0)


def send_many(peer: Peer) -> None:
    for _ in range(SENDS):
        peer.groups.send_hidden(torch.ones(1, 3))


@pytest.mark.parametrize(
    ("waiting", "wait"),
    [
        pytest.param(2, lambda peer: peer.groups.receive_hidden(1).wait(), id="activations"),
        pytest.param(1, lambda peer: peer.groups.receive_device_tokens(1).wait(), id="fed tokens"),
        pytest.param(0, lambda peer: peer.tensor.all_reduce(torch.ones(1)), id="tensor group"),
        pytest.param(1, send_many, id="sends"),
    ],
)
async def test_a_wait_for_a_peer_has_its_own_bound(
    peers: Callable[..., Any], waiting: int, wait: Callable[[Peer], Any]
) -> None:
    peer = (await peers(2, 2, timeout_s=60.0, wait_s=0.5))[waiting]
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        await in_threads(lambda: wait(peer))


def test_ranks_of_a_stage_outside_an_epoch_cannot_compute() -> None:
    with pytest.raises(EngineError, match="no epoch"):
        TensorLink(2, RankProgress()).all_reduce(torch.ones(1))
