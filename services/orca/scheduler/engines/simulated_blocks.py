"""The KV blocks of simulated stages, with the tokens in them: a step that would read other tokens fails an assertion.

Real ranks do the same with keys and values (worker/stage/kv_cache.py), and cannot see whose they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from orca.core.domain.step import NewRequest, PrefixBlocks, Row, Step


@dataclass(slots=True)
class _HeldBlocks:
    """The blocks of a request."""

    tokens: list[int]  # all that it has, those that it drew included
    blocks: list[int] = field(default_factory=list)
    shared: int = 0  # the first blocks, which others fill
    is_checked: bool = False  # what the shared blocks hold


class SimulatedBlocks:
    """The blocks of one epoch.

    Args:
        blocks: of each stage's memory.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._contents: list[tuple[int, ...]] = [()] * blocks  # tokens whose keys and values each block has
        self._held: dict[int, _HeldBlocks] = {}
        self._kept: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def shared(self) -> int:
        """Blocks of requests that other requests count already."""
        held = [block for each in self._held.values() for block in each.blocks]
        return len(held) - len(set(held))

    def take(self, step: Step) -> None:
        """Take the differences of a step, and run its rows. The tokens that they draw come with `draw`."""
        for handle in step.freed:
            self._release(self._held.pop(handle).blocks)
        for handle in step.kept:
            self._kept[handle] = self._held.pop(handle).blocks
        for handle, blocks in step.evicted:
            self._evict(handle, blocks)
        for new in step.new:
            self._add(new, step)
        for row in step.rows:
            self._run(row)

    def draw(self, handle: int, token: int) -> None:
        """Give a request the token that it drew."""
        self._held[handle].tokens.append(token)

    def _evict(self, handle: int, blocks: int) -> None:
        kept = self._kept[handle]
        assert blocks < len(kept), "an eviction without blocks"
        self._release(kept[blocks:])
        del kept[blocks:]
        if not kept:
            del self._kept[handle]

    def _add(self, new: NewRequest, step: Step) -> None:
        assert not new.decoder_prefix or new.prefix is None, "a target begins with blocks of another request"
        held = self._held[new.handle] = _HeldBlocks(list(new.target))
        if new.prefix is not None:
            self._share(held, new.prefix, step)

    def _share(self, held: _HeldBlocks, prefix: PrefixBlocks, step: Step) -> None:
        other = self._held.get(prefix.handle)
        blocks = self._kept[prefix.handle] if other is None else other.blocks
        for row in step.rows:
            if row.handle == prefix.handle:
                self._extend(blocks, row.start + row.count)
        assert 0 < prefix.blocks <= len(blocks), "more blocks than the other request has"
        assert prefix.blocks * self._block_tokens < len(held.tokens), "no known token is left to compute"
        held.blocks, held.shared = blocks[: prefix.blocks], prefix.blocks
        for block in held.blocks:
            self._holders[block] += 1

    def _run(self, row: Row) -> None:
        held, size = self._held[row.handle], self._block_tokens
        if not held.is_checked:
            self._check_shared(held)
        assert row.start >= held.shared * size, "a row writes to a block that others have"
        self._extend(held.blocks, row.start + row.count)
        for place in range(row.start // size, -(-(row.start + row.count) // size)):
            end = min(row.start + row.count, (place + 1) * size)
            self._contents[held.blocks[place]] = tuple(held.tokens[place * size : end])

    def _check_shared(self, held: _HeldBlocks) -> None:
        held.is_checked = True
        for place, block in enumerate(held.blocks[: held.shared]):
            tokens = held.tokens[place * self._block_tokens : (place + 1) * self._block_tokens]
            assert self._contents[block] == tuple(tokens), "a shared block holds other tokens"

    def _extend(self, blocks: list[int], tokens: int) -> None:
        while len(blocks) * self._block_tokens < tokens:
            assert self._free, "no block is free: an eviction is missing"
            blocks.append(self._free.pop())
            self._holders[blocks[-1]] = 1
            self._contents[blocks[-1]] = ()

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
