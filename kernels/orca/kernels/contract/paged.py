"""The layout of a layer's paged KV cache, and how single tokens are read and written.

    cache   [blocks, 2 x kv heads, block_tokens, head_dim]    keys of all heads, then values of all heads
    tables  [lines, blocks of the longest request]            a line per request: its blocks, in order of positions
    slot = block x block_tokens + position % block_tokens     the memory of one token

The keys of one head in a block are contiguous: attention walks a context head by head, so it reads some kilobytes at a
time. With the heads of a token contiguous instead, attention took 1.4 times as long on a CPU, for contexts larger than
the processor's caches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """The places of some tokens' keys and values in the cache."""

    blocks: Tensor  # [tokens] int64
    offsets: Tensor  # [tokens] int64, offset inside the block

    @classmethod
    def of(cls, slots: Tensor, block_tokens: int) -> "TokenSlots":
        """Split slot numbers into blocks and offsets. Args: slots: [tokens] int64."""
        return cls(slots // block_tokens, slots % block_tokens)

    @classmethod
    def of_positions(cls, table: Tensor, begin: int, end: int, block_tokens: int) -> "TokenSlots":
        """Return the places of positions begin .. end - 1 of one request. Args: table: [blocks] of the request."""
        positions = torch.arange(begin, end, device=table.device)
        return cls(table[positions // block_tokens].long(), positions % block_tokens)

    def read(self, cache: Tensor) -> Tensor:
        """Return a copy of the keys and values, [tokens, 2 x kv heads, head_dim]."""
        return cache[self.blocks, :, self.offsets]

    def write(self, cache: Tensor, kv: Tensor) -> None:
        """Write keys and values into the cache. Args: kv: [tokens, 2 x kv heads, head_dim]."""
        cache[self.blocks, :, self.offsets] = kv
