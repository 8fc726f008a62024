"""The layout of a layer's paged keys and values, and how tokens get in and out of it one by one.

    cache   [blocks, 2 x kv heads, block_tokens, head_dim]    keys of all heads, then values of all heads
    tables  [lines, blocks of the longest request]            a line for each request: its blocks, in order of positions
    slot = block x block_tokens + position % block_tokens     the memory of one token

A head's keys of a block lie side by side: attention, which walks a context head by head, then reads some kilobytes at a
time. With the heads of a token side by side it took 1.4 times as long on a CPU, for contexts that no cache holds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """Where some tokens' keys and values are."""

    blocks: Tensor  # [tokens] int64
    offsets: Tensor  # [tokens] int64, in the block

    @classmethod
    def of(cls, slots: Tensor, block_tokens: int) -> "TokenSlots":
        """Args: slots: [tokens] int64."""
        return cls(slots // block_tokens, slots % block_tokens)

    @classmethod
    def of_positions(cls, table: Tensor, begin: int, end: int, block_tokens: int) -> "TokenSlots":
        """Args: table: [blocks], of the request whose positions begin .. end - 1 are meant."""
        positions = torch.arange(begin, end, device=table.device)
        return cls(table[positions // block_tokens].long(), positions % block_tokens)

    def read(self, cache: Tensor) -> Tensor:
        """Keys and values, a copy: [tokens, 2 x kv heads, head_dim]."""
        return cache[self.blocks, :, self.offsets]

    def write(self, cache: Tensor, kv: Tensor) -> None:
        """Args: kv: [tokens, 2 x kv heads, head_dim]."""
        cache[self.blocks, :, self.offsets] = kv
