"""The paged keys and values of one rank (the paper's Attention K/V manager; ORCA, sections 3 and 4.2).

Memory is cut into blocks of `block_tokens` slots; a slot holds one token's keys and values in every layer of the stage.

    layer tensor [blocks, 2 x kv heads, block_tokens, head_dim]     (kernels/paged.py)
    slot = block x block_tokens + position % block_tokens

A request reserves slots for its whole length when it first appears, so it never waits for memory; blocks are taken from
the free list only as its tokens come.
"""

import contextlib
import math
import mmap
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orca.core.errors import EngineError
from orca.core.request import slots_needed


@dataclass(slots=True)
class _Table:
    """One request's blocks."""

    slots_reserved: int  # whole blocks
    blocks: list[int] = field(default_factory=list)
    # Slot of each position; filled block by block, as long as the reservation.
    slot_of: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


class KVCache:
    """Blocks, block tables and the tensors they point into.

    Args:
        num_layers: layers of the stage.
        slots: a whole number of blocks.
        kv_heads: of this rank.
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
    ) -> None:
        if slots % block_tokens:
            raise EngineError(f"{slots} slots are not a whole number of blocks of {block_tokens}")
        self.slots = slots
        self.block_tokens = block_tokens
        shape = (slots // block_tokens, 2 * kv_heads, block_tokens, head_dim)
        self.layers: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        # Last in, first out: a block that was just freed is the one most likely to be in the processor's cache.
        self._free = list(range(slots // block_tokens - 1, -1, -1))
        self._tables: dict[int, _Table] = {}
        self._slots_reserved = 0

    def reserve(self, handle: int, max_total_tokens: int) -> None:
        """Promise a request the slots of its whole length, rounded up to blocks.

        Raises: EngineError when they are not there: the master counts the same slots, so the epoch is broken.
        """
        needed = slots_needed(max_total_tokens, self.block_tokens)
        if handle in self._tables:
            raise EngineError(f"request {handle} is on this stage already")
        if self._slots_reserved + needed > self.slots:
            raise EngineError(
                f"request {handle} needs {needed} slots, but {self._slots_reserved} of {self.slots} are reserved"
            )
        self._slots_reserved += needed
        self._tables[handle] = _Table(needed, slot_of=np.empty(needed, np.int64))

    def extend(self, handle: int, tokens: int) -> NDArray[np.int64]:
        """Make room for a request's first `tokens` positions.

        Returns: their slots, [tokens]: a view that stays true until the request is freed.
        Raises: EngineError when the request is unknown or goes past its reservation.
        """
        table = self._tables.get(handle)
        if table is None:
            raise EngineError(f"request {handle} is not on this stage")
        if tokens > table.slots_reserved:
            raise EngineError(f"request {handle} runs {tokens} tokens, but reserved {table.slots_reserved} slots")
        while len(table.blocks) * self.block_tokens < tokens:
            block = self._free.pop()
            position = len(table.blocks) * self.block_tokens
            table.blocks.append(block)
            first = block * self.block_tokens
            table.slot_of[position : position + self.block_tokens] = np.arange(first, first + self.block_tokens)
        return table.slot_of[:tokens]

    def free(self, handle: int) -> None:
        """Take a request's blocks and reservation back. Unknown handles are fine: freeing may be repeated."""
        table = self._tables.pop(handle, None)
        if table is not None:
            self._free.extend(reversed(table.blocks))
            self._slots_reserved -= table.slots_reserved

    @property
    def slots_in_use(self) -> int:
        """Slots in blocks held by requests."""
        return sum(len(table.blocks) for table in self._tables.values()) * self.block_tokens

    @property
    def slots_reserved(self) -> int:
        return self._slots_reserved

    @property
    def bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def check(self) -> None:
        """Recount: each block is free or in one table, and reservations add up and hold their blocks."""
        held = [block for table in self._tables.values() for block in table.blocks]
        assert sorted(held + self._free) == list(range(self.slots // self.block_tokens)), (
            "a block is lost or held twice"
        )
        assert self._slots_reserved == sum(table.slots_reserved for table in self._tables.values()) <= self.slots
        assert all(len(table.blocks) * self.block_tokens <= table.slots_reserved for table in self._tables.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, which on the CPU takes no memory for pages that nobody has written to.

    torch.zeros writes the zeros: a cache then takes all its memory, and the time to fill it, at every join.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:  # a mapping cannot be empty
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: in shared memory reading a page would take it too. It is unmapped with the last tensor upon it.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Contexts lie all over the memory: with small pages, finding them took a tenth of attention's time.
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
