"""Steps for kernels in which the tables of requests begin with the same KV blocks (worker/stage/kv_cache.py)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orca.kernels.contract.paged import TokenSlots
from orca.kernels.contract.reference import ContextRow, KvWrite, attend_reference
from support.kernels.rows import PLAIN, some

BLOCK_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Sharer:
    """A request of a step.

    Args:
        context: its positions after the step.
        count: those of them that the step runs; 0: it has ended, and its table is kept.
        begins: the request with whose blocks its table begins, and how many of them.
    """

    context: int
    count: int
    begins: tuple[int, int] | None = None


STEPS: dict[str, list[Sharer]] = {
    # A prompt, and choices of it that run only its end, in the same step; one has only some of its blocks.
    "choices": [Sharer(11, 11), Sharer(11, 3, (0, 2)), Sharer(11, 3, (0, 2)), Sharer(9, 5, (0, 1))],
    # One token each, as in a recorded step. The first row fills the last block that two others begin with.
    "one token each": [Sharer(12, 1), Sharer(13, 1, (0, 3)), Sharer(13, 1, (0, 3)), Sharer(9, 1)],
    # A request that ended, others that begin with its blocks, and one that begins with those of a later one.
    "turns": [
        Sharer(16, 0),
        Sharer(19, 3, (0, 4)),
        Sharer(13, 5, (0, 2)),
        Sharer(17, 1, (1, 4)),
        Sharer(15, 3, (2, 3)),
    ],
    # Rows of several tiles; all of the prompt's blocks are filled by this step.
    "tiles": [Sharer(61, 61), Sharer(66, 6, (0, 15)), Sharer(52, 36, (0, 4)), Sharer(61, 1, (0, 15))],
}


@dataclass(slots=True)
class SharedStep:
    """The inputs of kernels for a step, and a plain computation of each request alone.

    No slot is known but those of earlier steps: all others hold NaN, also those that this step fills.

    Args:
        order: of the rows, as places in `sharers`.
    """

    sharers: Sequence[Sharer]
    order: Sequence[int]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    has_turns: bool = False
    qkv: Tensor = field(init=False)  # [tokens, heads + 2 x kv heads, head_dim]
    cache: Tensor = field(init=False)
    slots: Tensor = field(init=False)  # [tokens]
    turns: Tensor | None = field(init=False)
    tables: Tensor = field(init=False)
    rows: list[ContextRow] = field(init=False)

    def __post_init__(self) -> None:
        self._put_blocks()
        self.rows, first = [], 0
        for line in self.order:
            each = self.sharers[line]
            self.rows.append(ContextRow(first, each.count, each.context - each.count, line))
            first += each.count
        self.qkv = some(first, self.heads + 2 * self.kv_heads, self.head_dim, dtype=self.dtype, seed=1)
        self.turns = None
        if self.has_turns:
            angles = some(first, 1, self.head_dim // 2, dtype=torch.float32, seed=2)
            self.turns = torch.polar(torch.ones_like(angles), angles)
        owned = [self._own(row.line, row.position, row.end) for row in self.rows]
        self.slots = torch.cat([places.blocks * BLOCK_TOKENS + places.offsets for places in owned])
        earlier = torch.full((len(self.cache) * BLOCK_TOKENS,), 1, dtype=torch.bool)
        earlier[self.slots] = False
        unknown = ~earlier.view(-1, 1, BLOCK_TOKENS, 1).expand_as(self.cache)
        self.cache[unknown] = float("nan")

    def _put_blocks(self) -> None:
        """Give each request scattered blocks of its own behind those that it begins with."""
        needed = [-(-each.context // BLOCK_TOKENS) for each in self.sharers]
        free = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(3)).tolist()
        shape = (len(free), 2 * self.kv_heads, BLOCK_TOKENS, self.head_dim)
        self.cache = some(*shape, dtype=self.dtype, seed=4)
        self.tables = torch.full((len(needed), max(needed)), -1, dtype=torch.int32)
        for line, (each, blocks) in enumerate(zip(self.sharers, needed, strict=True)):
            other, shared = each.begins or (0, 0)
            assert shared * BLOCK_TOKENS <= each.context - each.count, "a row writes no shared block"
            self.tables[line, :shared] = self.tables[other, :shared]
            self.tables[line, shared:blocks] = torch.tensor([free.pop() for _ in range(blocks - shared)])
        unused = torch.tensor(free)
        self.cache[unused] = float("nan")

    def _own(self, line: int, begin: int, end: int) -> TokenSlots:
        return TokenSlots.of_positions(self.tables[line], begin, end, BLOCK_TOKENS)

    @property
    def kept(self) -> KvWrite:
        return KvWrite(self.cache, self.slots, self.turns)

    def expected(self, kv_of_query: Sequence[int], *, scale: float, window: int | None) -> Tensor:
        """Compute each request alone, with a cache of its own that holds its whole context in order."""
        qkv, places = self.qkv.clone(), torch.arange(len(self.qkv))
        written = torch.empty(len(qkv), 2 * self.kv_heads, 1, self.head_dim, dtype=self.dtype)
        PLAIN.write_kv(qkv, KvWrite(written, places, self.turns))
        of_step = {row.line: (row, written[row.first : row.first + row.count, :, 0]) for row in self.rows}
        output = torch.empty(len(qkv), len(kv_of_query), self.head_dim, dtype=self.dtype)
        for row in self.rows:
            kv = self._context(row.line, of_step)
            alone = kv[:, :, None].contiguous()  # blocks of one token
            table = torch.arange(len(kv), dtype=torch.int32)[None]
            here = slice(row.first, row.first + row.count)
            own = [ContextRow(0, row.count, row.position, 0)]
            query = qkv[here, : len(kv_of_query)]
            output[here] = attend_reference(query, alone, own, table, kv_of_query, scale=scale, window=window)
        return output.flatten(1)

    def _context(self, line: int, of_step: dict[int, tuple[ContextRow, Tensor]]) -> Tensor:
        """Return the keys and values of a request's positions, in order, by where each was computed."""
        each = self.sharers[line]
        other, shared = each.begins or (0, 0)
        begin, parts = shared * BLOCK_TOKENS, []
        if each.begins is not None:
            parts.append(self._context(other, of_step)[:begin])
        end = each.context - each.count
        parts.append(self._own(line, begin, end).read(self.cache))
        if line in of_step:
            parts.append(of_step[line][1])
        return torch.cat(parts)
