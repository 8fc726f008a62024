"""The paged keys and values of one rank (the paper's Attention K/V manager; ORCA, sections 3 and 4.2).

Memory is cut into blocks of `block_tokens` slots; a slot holds one token's keys and values in every layer of the stage.

    layer tensor [blocks, 2 x kv heads, block_tokens, head_dim]     (kernels/contract/paged.py)
    tables       [lines, blocks of the longest request]             a line for each request, on the device
    slot = block x block_tokens + position % block_tokens

A request reserves slots for its whole length at its first step, so it never waits for memory. Blocks are taken from the
free list only as its tokens come. The host decides with tables of its own. On a CPU they are also the tables that
kernels read; another device has a copy, which `publish` brings up to date.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orca.core.domain.errors import EngineError
from orca.core.domain.request import slots_needed
from orca.kernels.contract.transfer import to_device
from orca.kernels.cpu import huge_pages

_LINES, _COLUMNS = 16, 64
"""Size of the tables at first; they are doubled when more is needed."""
_LINES_ON_DEVICE = 512
"""Lines at first on devices other than the CPU, where tables that grow invalidate the recordings of all sizes."""


@dataclass(slots=True)
class _Table:
    """One request's blocks."""

    line: int
    slots_reserved: int  # whole blocks
    blocks: list[int] = field(default_factory=list)


class KVCache:
    """Blocks, block tables and the tensors they point into.

    Args:
        num_layers: layers of the stage.
        slots: a whole number of blocks.
        kv_heads: of this rank.
        longest: most positions of a request, as far as is known; sizes the tables.
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
    ) -> None:
        if slots % block_tokens:
            raise EngineError(f"{slots} slots are not a whole number of blocks of {block_tokens}")
        self.slots = slots
        self.block_tokens = block_tokens
        self._device = device
        shape = (slots // block_tokens, 2 * kv_heads, block_tokens, head_dim)
        self.layers: list[Tensor] = [self._zeros(shape, dtype) for _ in range(num_layers)]
        # Last in, first out: a block that was just freed is the one most likely to be in the processor's cache.
        self._free = list(range(slots // block_tokens - 1, -1, -1))
        self._tables: dict[int, _Table] = {}
        self._slots_reserved = 0
        self._host = np.zeros((0, _COLUMNS), np.int32)
        self._free_lines: list[int] = []
        self._unpublished: list[tuple[int, int, int]] = []  # line, place, block
        if device.type == "cpu":
            self._grow(_LINES, _COLUMNS)
        else:
            self._grow(_LINES_ON_DEVICE, _doubled(_COLUMNS, min(longest, slots) // block_tokens))

    def reserve(self, handle: int, max_total_tokens: int) -> int:
        """Reserve the slots of a request's whole length, rounded up to blocks.

        Returns: its line in `tables`, until it is freed.
        Raises: EngineError if there are too few slots: the master counts the same slots, so the epoch is broken.
        """
        needed = slots_needed(max_total_tokens, self.block_tokens)
        if handle in self._tables:
            raise EngineError(f"request {handle} is on this stage already")
        if self._slots_reserved + needed > self.slots:
            raise EngineError(
                f"request {handle} needs {needed} slots, but {self._slots_reserved} of {self.slots} are reserved"
            )
        self._slots_reserved += needed
        lines, columns = self._host.shape
        if not self._free_lines or needed > columns * self.block_tokens:
            wanted = _doubled(columns, needed // self.block_tokens)
            self._grow(lines if self._free_lines else 2 * lines, wanted)
        line = self._free_lines.pop()
        self._tables[handle] = _Table(line, needed)
        return line

    def extend(self, handle: int, tokens: int) -> int:
        """Give a request blocks for its first `tokens` positions.

        Returns: the block of the last position.
        Raises: EngineError if the request is unknown or goes past its reservation.
        """
        table = self._tables.get(handle)
        if table is None:
            raise EngineError(f"request {handle} is not on this stage")
        if tokens > table.slots_reserved:
            raise EngineError(f"request {handle} runs {tokens} tokens, but reserved {table.slots_reserved} slots")
        while len(table.blocks) * self.block_tokens < tokens:
            place, block = len(table.blocks), self._free.pop()
            table.blocks.append(block)
            self._host[table.line, place] = block
            self._unpublished.append((table.line, place, block))
        return table.blocks[(tokens - 1) // self.block_tokens]

    def free(self, handle: int) -> None:
        """Take back a request's blocks, line and reservation. Ignore an unknown handle: freeing may be repeated."""
        table = self._tables.pop(handle, None)
        if table is not None:
            self._free.extend(reversed(table.blocks))
            self._free_lines.append(table.line)
            self._slots_reserved -= table.slots_reserved

    def publish(self, *, is_recorded: bool = False) -> None:
        """Copy new blocks to the device's tables.

        Args:
            is_recorded: the step's recording writes them to the tables instead (kernels/contract/recording.py).
        """
        if self._unpublished and not is_recorded and self._device.type != "cpu":
            lines, places, blocks = to_device(np.array(self._unpublished, np.int64), self._device).T
            self.tables[lines, places] = blocks.int()
        self._unpublished.clear()

    def slots_of(self, lines: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each token. Args: lines, positions: [tokens]."""
        blocks = self._host[lines, positions // self.block_tokens].astype(np.int64)
        return blocks * self.block_tokens + positions % self.block_tokens

    @property
    def slots_in_use(self) -> int:
        """Slots in blocks held by requests. It reads one value, because another thread asks while blocks are taken."""
        return self.slots - len(self._free) * self.block_tokens

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
        lines = [table.line for table in self._tables.values()]
        assert sorted(lines + self._free_lines) == list(range(len(self._host))), "a line is lost or held twice"
        for table in self._tables.values():
            assert self.tables[table.line, : len(table.blocks)].tolist() == table.blocks

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._device.type == "cpu":
            # Contexts are scattered over the memory: with small pages, address translation took a tenth of attention's
            # time.
            return huge_pages.zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _grow(self, lines: int, columns: int) -> None:
        """Replace the tables by larger ones with the same contents."""
        before = self._host
        self._host = np.zeros((lines, columns), np.int32)
        self._host[: before.shape[0], : before.shape[1]] = before
        self._free_lines[:0] = range(lines - 1, before.shape[0] - 1, -1)
        tables = torch.from_numpy(self._host)
        self.tables = tables if self._device.type == "cpu" else tables.to(self._device)


def _doubled(number: int, least: int) -> int:
    """Double a number until it is at least `least`."""
    while number < least:
        number *= 2
    return number
