"""Mutants of a rank's cache do what their names say: a run against one that changes nothing would prove nothing."""

import importlib
from contextlib import nullcontext

import pytest
import torch

from checker.points.mutants import MUTANTS, NEIGHBOUR_EVERY
from orca.core.domain.step import PrefixBlocks
from orca.worker.stage.kv_cache import KVCache
from support.checker.installed_mutant import installed_mutant, owners


def cache() -> KVCache:
    """A cache of six blocks with two requests, each with one block."""
    kv = KVCache(
        num_layers=1,
        slots=24,
        block_tokens=4,
        kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for handle in (1, 2):
        kv.reserve(handle, 8)
        kv.extend(handle, 4)
    return kv


def first_blocks(kv: KVCache) -> list[int]:
    """The blocks that kernels read for the first positions of the requests, in the order of their lines."""
    return [int(block) for block in kv.tables[:2, 0]]


@pytest.mark.parametrize("is_mutant", [False, True])
def test_a_kept_block_is_overwritten(is_mutant: bool) -> None:
    with installed_mutant("a kept block overwritten") if is_mutant else nullcontext():
        kv = cache()
        kept = first_blocks(kv)[0]
        kv.keep(1)
        kv.reserve(3, 8)
        assert (kv.extend(3, 4) == kept) == is_mutant


@pytest.mark.parametrize("is_mutant", [False, True])
def test_a_request_uses_the_slots_of_its_neighbour(is_mutant: bool) -> None:
    with installed_mutant("neighbour's slots") if is_mutant else nullcontext():
        kv = cache()
        blocks = {kv.extend(2, 4, 3) for _ in range(NEIGHBOUR_EVERY)}
        first, second = first_blocks(kv)
        assert blocks == ({first, kv._tables[2].blocks[0]} if is_mutant else {second})
        assert (first == second) == is_mutant


@pytest.mark.parametrize("is_mutant", [False, True])
def test_a_request_begins_with_a_block_too_many(is_mutant: bool) -> None:
    with installed_mutant("a block too many") if is_mutant else nullcontext():
        kv = cache()
        kv.extend(1, 8)
        second = kv._tables[1].blocks[1]
        kv.reserve(3, 8)
        kv.share(3, PrefixBlocks(1, 1))
        assert (kv.extend(3, 5, 4) == second) == is_mutant
        assert first_blocks(kv)[0] == kv.tables[2, 0]


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_leaves_nothing_behind_in_this_process(name: str) -> None:
    module = importlib.import_module(MUTANTS[name][0])
    before = [dict(vars(owner)) for owner in owners(module)]
    with installed_mutant(name):
        assert [dict(vars(owner)) for owner in owners(module)] != before
    assert [dict(vars(owner)) for owner in owners(module)] == before
