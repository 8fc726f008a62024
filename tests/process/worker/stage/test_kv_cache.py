"""The paged KV cache: reservations, blocks on demand, reuse."""

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from orca.core.domain.errors import EngineError
from orca.core.domain.step import PrefixBlocks
from orca.worker.stage.kv_cache import KVCache
from support.resident import addresses, resident_bytes_at


def cache(slots: int = 32, block_tokens: int = 4, *, has_sources: bool = False) -> KVCache:
    return KVCache(
        num_layers=2,
        slots=slots,
        block_tokens=block_tokens,
        kv_heads=3,
        head_dim=5,
        dtype=torch.float32,
        device=torch.device("cpu"),
        has_sources=has_sources,
    )


def slots(kv: KVCache, handle: int, tokens: int) -> list[int]:
    """Make room for so many positions of a request: their slots."""
    kv.extend(handle, tokens)
    line = kv._tables[handle].line
    return kv.own.slots_of(np.full(tokens, line), np.arange(tokens)).tolist()


def test_blocks_are_allocated_as_tokens_arrive_and_not_before() -> None:
    kv = cache()
    kv.reserve(7, 10)
    assert (kv.slots_charged, kv.slots_in_use) == (12, 0)
    for tokens, used in ((1, 4), (4, 4), (5, 8), (10, 12)):
        assert len(set(slots(kv, 7, tokens))) == tokens
        assert kv.slots_in_use == used
        kv.check()


def test_slots_in_use_may_be_read_by_another_thread() -> None:
    """A rank's heartbeat does: an error would end it, and the rank."""
    kv, seen, is_over = cache(), set[int](), False

    def ask() -> None:
        while not is_over:
            seen.add(kv.slots_in_use)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as other:
            asked = other.submit(ask)
            for handle in range(5_000):
                kv.reserve(handle, 10)
                kv.extend(handle, 10)
                kv.free(handle - 1)
            is_over = True
            asked.result()
    finally:
        is_over = True
        sys.setswitchinterval(before)
    assert max(seen) <= kv.slots


def test_positions_keep_their_slots_while_a_request_grows() -> None:
    kv = cache()
    kv.reserve(1, 12)
    before = slots(kv, 1, 3)
    kv.reserve(2, 4)
    kv.extend(2, 4)
    assert slots(kv, 1, 12)[:3] == before


def test_freed_blocks_are_reused_and_freeing_twice_is_allowed() -> None:
    kv = cache(slots=8)
    kv.reserve(1, 8)
    first = set(slots(kv, 1, 8))
    kv.free(1)
    kv.free(1)
    kv.reserve(2, 8)
    assert set(slots(kv, 2, 8)) == first
    kv.check()


@pytest.mark.parametrize(
    ("handle", "tokens", "reason"),
    [(1, 4, "on this stage already"), (2, 32, "needs 32 slots, but 4 of 32 are reserved")],
)
def test_a_reservation_that_cannot_be_kept_is_refused(handle: int, tokens: int, reason: str) -> None:
    kv = cache()
    kv.reserve(1, 4)
    with pytest.raises(EngineError, match=reason):
        kv.reserve(handle, tokens)
    kv.check()


def test_no_request_goes_past_its_reservation() -> None:
    kv = cache()
    kv.reserve(1, 5)
    with pytest.raises(EngineError, match="runs 9 tokens, but reserved 8"):
        kv.extend(1, 9)
    with pytest.raises(EngineError, match="request 2 is not on this stage"):
        kv.extend(2, 1)


def test_slots_are_whole_blocks() -> None:
    with pytest.raises(EngineError, match="30 slots are not a whole number of blocks of 4"):
        cache(slots=30)


def test_no_slot_is_shared_in_a_long_random_run() -> None:
    kv, draw = cache(slots=64), random.Random(2)
    lengths: dict[int, int] = {}
    limits: dict[int, int] = {}
    for handle in range(400):
        limit = draw.randint(1, 20)
        while kv.slots_charged + -(-limit // 4) * 4 > 64:
            gone = draw.choice(list(lengths))
            kv.free(gone)
            del lengths[gone]
        kv.reserve(handle, limit)
        limits[handle], lengths[handle] = limit, 1
        for other in lengths:
            lengths[other] = draw.randint(lengths[other], limits[other])
        all_slots = [slot for other, length in lengths.items() for slot in slots(kv, other, length)]
        assert len(all_slots) == len(set(all_slots))
        kv.check()
        assert kv.slots_in_use - sum(lengths.values()) < 4 * len(lengths)


def source_slots(kv: KVCache, handle: int, tokens: int) -> list[int]:
    kv.extend_source(handle, tokens)
    line = kv._tables[handle].line
    assert kv.sources is not None
    return kv.sources.slots_of(np.full(tokens, line), np.arange(tokens)).tolist()


def test_a_request_begins_with_blocks_of_another_one_and_writes_none_of_them() -> None:
    kv = cache()
    kv.reserve(1, 12)
    first = slots(kv, 1, 10)
    kv.reserve(2, 12)
    kv.share(2, PrefixBlocks(1, 2))
    assert slots(kv, 2, 8) == first[:8]
    assert not set(slots(kv, 2, 12)[8:]) & set(first)
    assert kv.slots_in_use == 16
    kv.check()
    kv.extend(2, 12, 8)
    with pytest.raises(EngineError, match="request 2 would write position 7 of 2 blocks that it shares"):
        kv.extend(2, 12, 7)


def test_blocks_that_two_requests_have_are_free_when_both_have_ended() -> None:
    kv = cache()
    kv.reserve(1, 8)
    slots(kv, 1, 8)
    kv.reserve(2, 12)
    kv.share(2, PrefixBlocks(1, 2))
    for handle, in_use in ((1, 8), (2, 0)):
        kv.free(handle)
        kv.check()
        assert kv.slots_in_use == in_use


def test_a_kept_table_gives_its_blocks_to_later_requests_until_it_is_evicted() -> None:
    kv = cache()
    kv.reserve(1, 12)
    first = slots(kv, 1, 12)
    kv.keep(1)
    assert (kv.slots_charged, kv.slots_in_use) == (0, 12)
    kv.blocks.evict(PrefixBlocks(1, 2))
    assert kv.slots_in_use == 8
    kv.reserve(2, 12)
    kv.share(2, PrefixBlocks(1, 2))
    kv.blocks.evict(PrefixBlocks(1, 0))
    kv.check()
    assert (slots(kv, 2, 8), kv.slots_in_use) == (first[:8], 8)
    kv.reserve(3, 8)
    with pytest.raises(EngineError, match="request 3 begins with 1 blocks of request 1, which has no table"):
        kv.share(3, PrefixBlocks(1, 1))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda kv: kv.share(2, PrefixBlocks(1, 3)), "begins with 3 blocks of request 1, which has 2 on this stage"),
        (lambda kv: kv.share(2, PrefixBlocks(9, 1)), "begins with 1 blocks of request 9, which has no table"),
        (lambda kv: kv.share(1, PrefixBlocks(1, 1)), "request 1 cannot begin with 1 blocks of another one"),
        (lambda kv: kv.keep(9), "the blocks of request 9 cannot be kept"),
        (lambda kv: kv.blocks.evict(PrefixBlocks(1, 0)), "no 0 blocks of request 1 are kept"),
    ],
    ids=["too many", "unknown", "not at its start", "keeps nobody", "not kept"],
)
def test_a_step_that_does_not_fit_the_tables_breaks_the_epoch(act: Callable[[KVCache], None], reason: str) -> None:
    kv = cache()
    kv.reserve(1, 8)
    slots(kv, 1, 8)
    kv.reserve(2, 16)
    with pytest.raises(EngineError, match=reason):
        act(kv)


def test_a_block_that_several_requests_have_is_charged_once() -> None:
    kv = cache(slots=24)
    kv.reserve(1, 12)
    slots(kv, 1, 12)
    kv.reserve(2, 12)
    kv.share(2, PrefixBlocks(1, 2))
    assert kv.slots_charged == 16
    kv.reserve(3, 8)
    with pytest.raises(EngineError, match="request 4 needs 4 slots, but 24 of 24 are reserved"):
        kv.reserve(4, 1)
    kv.check()
    kv.keep(1)
    assert kv.slots_charged == 20, "the third block of request 1 counts no more"
    kv.free(2)
    assert kv.slots_charged == 8
    kv.check()


def test_without_an_eviction_no_block_is_taken_from_a_kept_table() -> None:
    kv = cache(slots=12)
    kv.reserve(1, 12)
    slots(kv, 1, 12)
    kv.keep(1)
    kv.reserve(2, 4)
    with pytest.raises(EngineError, match="request 2 needs a KV block and none is free"):
        kv.extend(2, 1)


def test_a_source_has_a_table_of_its_own_in_the_same_blocks() -> None:
    kv = cache(slots=24, has_sources=True)
    kv.reserve(1, 6, 5)
    assert kv.slots_charged == 16
    with pytest.raises(EngineError, match="request 2 needs 12 slots, but 16 of 24 are reserved"):
        kv.reserve(2, 1, 5)
    kv.reserve(3, 4, 1)
    every = [*source_slots(kv, 1, 5), *slots(kv, 1, 6), *slots(kv, 3, 4), *source_slots(kv, 3, 1)]
    assert len(every) == len(set(every))
    assert kv.slots_in_use == 24
    kv.check()
    kv.free(1)
    assert (kv.slots_in_use, kv.slots_charged) == (8, 8)
    kv.free(3)
    assert (kv.slots_in_use, kv.slots_charged) == (0, 0)
    kv.check()


def test_a_source_keeps_to_its_reservation() -> None:
    kv = cache(has_sources=True)
    kv.reserve(1, 4, 5)
    with pytest.raises(EngineError, match="runs 9 tokens, but reserved 8"):
        kv.extend_source(1, 9)
    with pytest.raises(EngineError, match="request 2 has no source on this stage"):
        kv.extend_source(2, 1)


def test_no_slot_is_shared_between_sources_and_targets_in_a_long_random_run() -> None:
    kv, draw = cache(slots=128, has_sources=True), random.Random(3)
    held: dict[int, tuple[int, int, int]] = {}  # source, target so far, its limit
    for handle in range(300):
        source, limit = draw.randint(1, 40), draw.randint(1, 20)
        while kv.slots_charged + -(-limit // 4) * 4 + -(-source // 4) * 4 > 128:
            gone = draw.choice(list(held))
            kv.free(gone)
            del held[gone]
        kv.reserve(handle, limit, source)
        held[handle] = source, 1, limit
        for other, (length, so_far, most) in held.items():
            held[other] = length, draw.randint(so_far, most), most
        every = [slot for other, (length, _, _) in held.items() for slot in source_slots(kv, other, length)]
        every += [slot for other, (_, so_far, _) in held.items() for slot in slots(kv, other, so_far)]
        assert len(every) == len(set(every))
        kv.check()
        # Within one block for each table of what the requests hold.
        assert kv.slots_in_use - len(every) < 2 * 4 * len(held)


def test_tables_grow_with_requests_and_lengths_and_keep_what_they_hold() -> None:
    kv = cache(slots=4096)
    kv.reserve(0, 10)
    before = slots(kv, 0, 10)
    for handle in range(1, 40):
        kv.reserve(handle, 4)
    kv.reserve(40, 1000)
    assert kv.tables.shape[0] > 40
    assert kv.tables.shape[1] >= 250
    assert slots(kv, 0, 10) == before
    assert len(set(slots(kv, 40, 1000))) == 1000
    kv.check()


def test_extending_names_the_block_of_the_last_position() -> None:
    kv = cache()
    kv.reserve(1, 12)
    assert [kv.extend(1, tokens) for tokens in (1, 4, 5, 12)] == [kv.tables[0, place] for place in (0, 0, 1, 2)]


def test_memory_is_the_size_of_the_slots_in_every_layer() -> None:
    assert cache().bytes == 32 * 2 * (2 * 3 * 5) * 4


def test_memory_is_resident_only_for_written_slots() -> None:
    kv = KVCache(
        num_layers=2,
        slots=1 << 18,
        block_tokens=16,
        kv_heads=2,
        head_dim=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert kv.bytes == 256 << 20
    parts = [addresses(layer) for layer in kv.layers]
    assert resident_bytes_at(*parts) < 16 << 20
    assert not kv.layers[1].flatten()[::512].any()  # reads of every page
    assert resident_bytes_at(*parts) < 16 << 20
    for layer in kv.layers:
        layer[: len(layer) // 2] = 1.0
    assert 120 << 20 < resident_bytes_at(*parts) < 144 << 20
    del kv, layer
    assert resident_bytes_at(*parts) < 16 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_new_cache_is_all_zeros_of_its_type(dtype: torch.dtype) -> None:
    kv = KVCache(num_layers=1, slots=8, block_tokens=4, kv_heads=1, head_dim=3, dtype=dtype, device=torch.device("cpu"))
    [layer] = kv.layers
    assert torch.equal(layer, torch.zeros(2, 2, 4, 3, dtype=dtype))
