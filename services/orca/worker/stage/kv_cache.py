"""The paged keys and values of one rank (the paper's Attention K/V manager; ORCA, sections 3 and 4.2).

Memory is cut into blocks of `block_tokens` slots; a slot holds one token's keys and values in every layer of the stage.

    layer tensor [blocks, 2 x kv heads, block_tokens, head_dim]     (kernels/contract/paged.py)
    tables       [lines, blocks of the longest request]             a line for each request, on the device
    slot = block x block_tokens + position % block_tokens

A request of an encoder-decoder model has a second table: the keys and values of its source for cross attention lie in
the same blocks. Its line is the same in both tables.

A request reserves slots for its whole length at its first step, so it never waits for memory. Blocks that several
requests have are charged once; a scheduler that charges them for each request stays below this bound. Blocks are taken
from the free list only as tokens come. The host decides with tables of its own. On a CPU they are also the tables that
kernels read; another device has a copy, which `publish` brings up to date.

Tables may have their first blocks in common: a request may begin with those of another one. That one may have ended,
and its table is kept. A block is free again when no table has it. Only the request that took it from the free list
writes to it.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orca.core.domain.errors import EngineError
from orca.core.domain.request import slots_needed
from orca.core.domain.step import PrefixBlocks
from orca.kernels.contract.transfer import to_device
from orca.kernels.cpu import huge_pages

_LINES, _COLUMNS = 16, 64
"""Size of the tables at first; they are doubled when more is needed."""
_LINES_ON_DEVICE = 512
"""Lines at first on devices other than the CPU, where tables that grow invalidate the recordings of all sizes."""


@dataclass(slots=True)
class _Table:
    """One request's blocks for its own positions, or for those of its source."""

    line: int
    slots_reserved: int  # whole blocks
    blocks: list[int] = field(default_factory=list)
    shared: int = 0  # the first of them, which it does not write


class BlockTables:
    """The tables of all requests, a line for each: the host's, and those that kernels read.

    Args:
        columns: blocks of the longest request so far.
    """

    def __init__(self, lines: int, columns: int, block_tokens: int, device: torch.device) -> None:
        self._block_tokens = block_tokens
        self._device = device
        self.host = np.zeros((0, columns), np.int32)
        self._unpublished: list[tuple[int, int, int]] = []  # line, place, block
        self.grow(lines, columns)

    @staticmethod
    def is_copied(device: torch.device) -> bool:
        """Return whether kernels on a device read a copy of the host's tables."""
        return device.type != "cpu"

    def slots_of(self, lines: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each token. Args: lines, positions: [tokens]."""
        blocks = self.host[lines, positions // self._block_tokens].astype(np.int64)
        return blocks * self._block_tokens + positions % self._block_tokens

    def put(self, line: int, place: int, block: int) -> None:
        self.host[line, place] = block
        self._unpublished.append((line, place, block))

    def publish(self, *, is_recorded: bool) -> None:
        if self._unpublished and not is_recorded and self.is_copied(self._device):
            lines, places, blocks = to_device(np.array(self._unpublished, np.int64), self._device).T
            self.tensor[lines, places] = blocks.int()
        self._unpublished.clear()

    def grow(self, lines: int, columns: int) -> None:
        """Replace the tables by larger ones with the same contents."""
        before = self.host
        self.host = np.zeros((lines, columns), np.int32)
        self.host[: before.shape[0], : before.shape[1]] = before
        tables = torch.from_numpy(self.host)
        self.tensor = tables.to(self._device, copy=True) if self.is_copied(self._device) else tables


class BlockStore:
    """The blocks of the memory: each is free, or in the tables of requests and in kept tables."""

    def __init__(self, blocks: int) -> None:
        # Last in, first out: a block that was just freed is the one most likely to be in the processor's cache.
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks  # tables that have each block
        self._living = [0] * blocks  # those of them that are no kept tables
        self.shared = 0  # blocks of requests that other requests count already
        self._kept: dict[int, list[int]] = {}  # blocks of requests that have ended, by handle

    @property
    def in_use(self) -> int:
        """Blocks that are not free."""
        return len(self._holders) - len(self._free)

    def take(self, handle: int) -> int:
        """Return a free block for a table. Raises: EngineError if there is none: an eviction is missing."""
        if not self._free:
            raise EngineError(f"request {handle} needs a KV block and none is free: kept tables have the others")
        block = self._free.pop()
        self._holders[block] = self._living[block] = 1
        return block

    def hold(self, blocks: Sequence[int]) -> None:
        """Count blocks for the table of one more request."""
        for block in blocks:
            self._holders[block] += 1
            self.shared += self._living[block] > 0
            self._living[block] += 1

    def leave(self, blocks: Sequence[int]) -> None:
        """Count blocks no more for the table of a request, which is freed or kept next."""
        for block in blocks:
            self._living[block] -= 1
            self.shared -= self._living[block] > 0

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks out of a table that counts for no request."""
        holders = self._holders
        for block in reversed(blocks):
            holders[block] -= 1
            if not holders[block]:
                self._free.append(block)

    def keep(self, handle: int, blocks: list[int]) -> None:
        """Keep the table of a request that ends."""
        self.leave(blocks)
        self._kept[handle] = blocks

    def kept(self, handle: int) -> list[int] | None:
        """Return the blocks of a kept table; None if there is none."""
        return self._kept.get(handle)

    def evict(self, kept: PrefixBlocks) -> None:
        """Drop blocks of a kept table: only the first ones stay. Raises: EngineError if it has not so many."""
        blocks = self._kept.get(kept.handle)
        if blocks is None or len(blocks) < kept.blocks:
            raise EngineError(f"no {kept.blocks} blocks of request {kept.handle} are kept on this stage")
        self.release(blocks[kept.blocks :])
        del blocks[kept.blocks :]
        if not blocks:
            del self._kept[kept.handle]

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Recount: each block is free or in as many tables as counted. Args: tables: of all requests."""
        living = Counter(block for blocks in tables for block in blocks)
        held = living + Counter(block for blocks in self._kept.values() for block in blocks)
        assert sorted([*held, *self._free]) == list(range(len(self._holders))), "a block is lost"
        assert self._holders == [held[block] for block in range(len(self._holders))], "tables of a block miscounted"
        assert self._living == [living[block] for block in range(len(self._living))], "requests of a block miscounted"
        assert self.shared == living.total() - len(living), "shared blocks miscounted"
        assert all(self._kept.values()), "a kept table without blocks"


class KVCache:
    """Blocks, block tables and the tensors they point into.

    Args:
        num_layers: layers of the stage.
        slots: a whole number of blocks.
        kv_heads: of this rank.
        longest: most positions of a request, as far as is known; sizes the tables.
        has_sources: requests have a source, with a table of its own.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        slots: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        longest: int = 0,
        has_sources: bool = False,
    ) -> None:
        if slots % block_tokens:
            raise EngineError(f"{slots} slots are not a whole number of blocks of {block_tokens}")
        self.slots = slots
        self.block_tokens = block_tokens
        self._device = device
        shape = (slots // block_tokens, 2 * kv_heads, block_tokens, head_dim)
        self.layers: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.bytes = sum(layer.numel() * layer.element_size() for layer in self.layers)
        self.blocks = BlockStore(slots // block_tokens)
        self._tables: dict[int, _Table] = {}
        self._source_tables: dict[int, _Table] = {}
        self._slots_reserved = 0
        lines, columns = _LINES, _COLUMNS
        if device.type != "cpu":
            lines, columns = _LINES_ON_DEVICE, _doubled(_COLUMNS, min(longest, slots) // block_tokens)
        self.own = BlockTables(lines, columns, block_tokens, device)
        self.sources = BlockTables(lines, columns, block_tokens, device) if has_sources else None
        self._free_lines = list(range(lines - 1, -1, -1))

    @property
    def tables(self) -> Tensor:
        """[lines, blocks] int32: the blocks of each request's own positions, in their order. They move as they grow."""
        return self.own.tensor

    @property
    def source_tables(self) -> Tensor | None:
        """[lines, blocks] int32: the blocks of each request's source; None if requests have no sources."""
        return None if self.sources is None else self.sources.tensor

    def reserve(self, handle: int, tokens: int, source_tokens: int = 0) -> int:
        """Reserve the slots of a request's whole length, rounded up to blocks in each of its tables.

        Args:
            tokens: positions of its own; those of the target of an encoder-decoder model.
            source_tokens: positions of its source.
        Returns: its line in `tables`, until it is freed.
        Raises: EngineError if there are too few slots: the master counts the same slots, so the epoch is broken.
        """
        own, of_source = (slots_needed(each, self.block_tokens) for each in (tokens, source_tokens))
        if handle in self._tables:
            raise EngineError(f"request {handle} is on this stage already")
        if self.slots_charged + own + of_source > self.slots:
            raise EngineError(
                f"request {handle} needs {own + of_source} slots, but {self.slots_charged} of {self.slots} are reserved"
            )
        self._slots_reserved += own + of_source
        lines, columns = self.own.host.shape
        longest = max(own, of_source)
        if not self._free_lines or longest > columns * self.block_tokens:
            self._grow(lines if self._free_lines else 2 * lines, _doubled(columns, longest // self.block_tokens))
        line = self._free_lines.pop()
        self._tables[handle] = _Table(line, own)
        if of_source:
            self._source_tables[handle] = _Table(line, of_source)
        return line

    def share(self, handle: int, prefix: PrefixBlocks) -> None:
        """Begin the table of a request with blocks of another one, whose rows have filled them or do so in this step.

        Raises: EngineError if the other one is unknown or has fewer blocks: the master counts the same blocks.
        """
        other = self._tables.get(prefix.handle)
        blocks = self.blocks.kept(prefix.handle) if other is None else other.blocks
        if blocks is None or len(blocks) < prefix.blocks:
            raise EngineError(
                f"request {handle} begins with {prefix.blocks} blocks of request {prefix.handle}, which has "
                f"{'no table' if blocks is None else len(blocks)} on this stage"
            )
        table = self._tables[handle]
        if table.blocks or prefix.blocks * self.block_tokens > table.slots_reserved:
            raise EngineError(f"request {handle} cannot begin with {prefix.blocks} blocks of another one")
        table.blocks, table.shared = blocks[: prefix.blocks], prefix.blocks
        self.blocks.hold(table.blocks)
        for place, block in enumerate(table.blocks):
            self.own.put(table.line, place, block)
        # A recorded step writes the blocks that a request takes in it, and no others.
        self.own.publish(is_recorded=False)

    def extend(self, handle: int, tokens: int, start: int = sys.maxsize) -> int:
        """Give a request blocks for its first `tokens` positions.

        Args: start: the first position that is written next.
        Returns: the block of the last position.
        Raises: EngineError if the request is unknown, goes past its reservation, or would write to shared blocks.
        """
        table = self._tables.get(handle)
        if table is None:
            raise EngineError(f"request {handle} is not on this stage")
        if start < table.shared * self.block_tokens:
            raise EngineError(f"request {handle} would write position {start} of {table.shared} blocks that it shares")
        return self._extend(self.own, table, handle, tokens)

    def extend_source(self, handle: int, tokens: int) -> int:
        """Give a request blocks for the keys and values of its source, whose length is `tokens` (see `extend`)."""
        table = self._source_tables.get(handle)
        if table is None or self.sources is None:
            raise EngineError(f"request {handle} has no source on this stage")
        return self._extend(self.sources, table, handle, tokens)

    def _extend(self, tables: BlockTables, table: _Table, handle: int, tokens: int) -> int:
        if tokens > table.slots_reserved:
            raise EngineError(f"request {handle} runs {tokens} tokens, but reserved {table.slots_reserved} slots")
        while len(table.blocks) * self.block_tokens < tokens:
            place, block = len(table.blocks), self.blocks.take(handle)
            table.blocks.append(block)
            tables.put(table.line, place, block)
        return table.blocks[(tokens - 1) // self.block_tokens]

    def free(self, handle: int) -> None:
        """Take back a request's blocks, line and reservation. Ignore an unknown handle: freeing may be repeated."""
        table = self._tables.pop(handle, None)
        if table is None:
            return
        self._free_lines.append(table.line)
        for each in (table, self._source_tables.pop(handle, None)):
            if each is not None:
                self.blocks.leave(each.blocks)
                self.blocks.release(each.blocks)
                self._slots_reserved -= each.slots_reserved

    def keep(self, handle: int) -> None:
        """Take back a request's line and reservation, and keep its blocks.

        Raises: EngineError if it is unknown, or has a source: other requests never begin with its blocks.
        """
        table = self._tables.get(handle)
        if table is None or handle in self._source_tables:
            raise EngineError(f"the blocks of request {handle} cannot be kept on this stage")
        blocks, table.blocks = table.blocks, []
        self.free(handle)
        self.blocks.keep(handle, blocks)

    def publish(self, *, is_recorded: bool = False) -> None:
        """Copy new blocks to the device's tables.

        Args:
            is_recorded: the step's recording writes those of own positions to the tables instead
                (kernels/contract/recording.py).
        """
        self.own.publish(is_recorded=is_recorded)
        if self.sources is not None:
            self.sources.publish(is_recorded=False)

    @property
    def slots_in_use(self) -> int:
        """Slots in blocks that are not free. It reads one value, because another thread asks while blocks are taken."""
        return self.blocks.in_use * self.block_tokens

    @property
    def slots_charged(self) -> int:
        """Slots of all blocks that requests have, each counted once, and of those that they may still take."""
        return self._slots_reserved - self.blocks.shared * self.block_tokens

    def check(self) -> None:
        """Recount: each block is free or in tables, and reservations add up and hold their blocks."""
        tables = [*self._tables.values(), *self._source_tables.values()]
        self.blocks.check([table.blocks for table in tables])
        assert self._slots_reserved == sum(table.slots_reserved for table in tables)
        assert self.slots_charged <= self.slots
        assert all(len(table.blocks) * self.block_tokens <= table.slots_reserved for table in tables)
        lines = [table.line for table in self._tables.values()]
        assert sorted(lines + self._free_lines) == list(range(len(self.own.host))), "a line is lost or held twice"
        for handle, table in self._tables.items():
            assert self.tables[table.line, : len(table.blocks)].tolist() == table.blocks
            of_source = self._source_tables.get(handle)
            if of_source is not None and self.source_tables is not None:
                assert of_source.line == table.line
                assert self.source_tables[table.line, : len(of_source.blocks)].tolist() == of_source.blocks
        assert self._source_tables.keys() <= self._tables.keys(), "a source without its request"

    def _grow(self, lines: int, columns: int) -> None:
        """Replace the tables by larger ones with the same contents."""
        self._free_lines[:0] = range(lines - 1, len(self.own.host) - 1, -1)
        self.own.grow(lines, columns)
        if self.sources is not None:
            self.sources.grow(lines, columns)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        # Contexts are scattered over the memory: with small pages, address translation took a tenth of attention's
        # time.
        return huge_pages.zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _doubled(number: int, least: int) -> int:
    """Double a number until it is at least `least`."""
    while number < least:
        number *= 2
    return number
