"""The common prefixes of a group's requests: what a request need not compute, and what a step says about KV blocks.

A request is matched once, at its first pick. It gets the longest chain of full blocks that earlier steps have filled,
or that older rows of the same step fill. In every layer a stage writes the keys and values of the whole step before
attention reads any. The last known token of a request is always computed, since that one draws the next token.

Policies ask `hit`, which is the only lookup, and leave the rest to `GroupState`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from orca.core.domain.engine import PrefixCharge
from orca.core.domain.step import PrefixBlocks
from orca.scheduler.policy.batch import NO_HIT, Admission, Batch, BatchRow, GroupRequest, PrefixHit
from orca.scheduler.policy.prefix_index import Node, PrefixIndex, block_keys, check_index, shared_blocks


@dataclass(slots=True)
class BlockChanges:
    """The part of a step about blocks (core.domain.step)."""

    freed: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    evicted: dict[int, int] = field(default_factory=dict)  # kept handle -> blocks that stay
    prefixes: dict[int, PrefixBlocks] = field(default_factory=dict)  # by handle of a new request
    evictions: int = 0  # blocks taken out of the index


class GroupPrefixes:
    """The prefixes of one epoch, for decoder-only models.

    Args:
        slots: of the group, a whole number of blocks.
    """

    def __init__(self, slots: int, block_tokens: int, *, charge: PrefixCharge = PrefixCharge.EACH) -> None:
        self.index = PrefixIndex(slots // block_tokens)
        self._block_tokens = block_tokens
        self._charge = charge

    def uncharged_slots(self, leaving: Iterable[GroupRequest] = ()) -> int:
        """Return the reserved slots that are not charged, because they are in blocks for which others are charged.

        Args: leaving: requests that are counted as ended.
        """
        if self._charge is PrefixCharge.EACH:
            return 0
        tables = [entry.table for entry in leaving if entry.table is not None]
        return shared_blocks(self.index, tables) * self._block_tokens

    def hit(self, entry: GroupRequest, prompts: Sequence[BatchRow]) -> PrefixHit:
        """Return the blocks that a request need not compute if it is picked now. They stay until it is admitted.

        Args: prompts: rows of the same batch that run tokens of older requests' prompts.
        """
        blocks_max = (len(entry.known) - 1) // self._block_tokens
        if not blocks_max or not _may_hit(entry):
            return NO_HIT
        keys = block_keys(entry.known, self._block_tokens)
        node = self.index.match(entry.request.cache_salt, keys, blocks_max)
        blocks, filler = 0 if node is None else node.depth, None
        for row in prompts:
            if (common := self._common_blocks(entry, row, blocks, blocks_max)) > blocks:
                blocks, node, filler = common, None, row.request
        return PrefixHit(blocks * self._block_tokens, blocks, node, filler) if blocks else NO_HIT

    def carry_out(self, batch: Batch) -> BlockChanges:
        """Note what a batch does with blocks, whose requests have their handles. Returns: what its step says of it."""
        changes, evictions = BlockChanges(), self.index.evictions
        for entry in batch.freed:
            self._end(entry, changes)
        late: dict[int, PrefixHit] = {}  # new handle -> blocks of which an older row of this step fills some
        for admission in batch.admitted:
            self._begin(admission, changes, late)
        touched = [row for row in batch.rows if row.start + row.count >= row.request.watch]
        # All that goes is chosen before anything is filled, so no block goes that a later row begins with.
        self.index.make_room(sum(self._more_blocks(row, late) for row in touched))
        for row in touched:
            self._run(row, changes, late)
        changes.evicted |= self.index.take_shrunk()
        changes.evictions = self.index.evictions - evictions
        return changes

    def forget(self, entry: GroupRequest) -> None:
        """Take the blocks of a refused request out of the index, except those that others have."""
        if entry.table is not None:
            self.index.forget(entry.table)

    def check(self, requests: Iterable[GroupRequest]) -> None:
        """Recount every invariant. Args: requests: of the group. Raises: AssertionError."""
        check_index(self.index)
        admitted = [entry for entry in requests if entry.is_admitted]
        living = {handle for handle, table in self.index.tables.items() if table.is_living}
        assert living == {entry.handle for entry in admitted}, "the tables are not those of the admitted requests"
        for entry in requests:
            if entry.table is not None:
                assert len(entry.table.blocks) == -(-entry.computed // self._block_tokens), "blocks without tokens"
                assert len(entry.table.blocks) * self._block_tokens <= entry.slots, "more blocks than reserved"
        self._check_charge(admitted)

    def _check_charge(self, admitted: Sequence[GroupRequest]) -> None:
        """Recount the slots that are not charged: for all requests, and for all but one."""
        for leaving in ([], *([entry] for entry in admitted)):
            tables = [entry.table for entry in admitted if entry.table is not None and entry not in leaving]
            different = {id(block) for table in tables for block in table.blocks}
            shared = sum(len(table.blocks) for table in tables) - len(different)
            uncharged = shared * self._block_tokens if self._charge is PrefixCharge.ONCE else 0
            assert self.uncharged_slots(leaving) == uncharged, "shared blocks miscounted"
            given_back = sum(entry.slots for entry in leaving) + uncharged - self.uncharged_slots()
            assert given_back >= 0, "the end of a request raises what is charged"

    def _end(self, entry: GroupRequest, changes: BlockChanges) -> None:
        table, handle = entry.table, entry.handle
        assert table is not None
        assert handle is not None
        had = len(table.blocks)
        if not entry.is_refused:
            self._fill(entry, entry.computed)
        stay = self.index.end(table)
        entry.table = None
        (changes.kept if stay else changes.freed).append(handle)
        if 0 < stay < had:
            changes.evicted[handle] = stay

    def _begin(self, admission: Admission, changes: BlockChanges, late: dict[int, PrefixHit]) -> None:
        entry, hit = admission.request, admission.prefix
        assert entry.handle is not None
        entry.table, entry.watch = self.index.begin(entry.handle, entry.request.cache_salt), 0
        if hit.node is not None:
            self._share(entry, hit.node, changes)
        elif hit.filler is not None:
            late[entry.handle] = hit

    def _run(self, row: BatchRow, changes: BlockChanges, late: dict[int, PrefixHit]) -> None:
        entry, end = row.request, row.start + row.count
        assert entry.handle is not None
        assert entry.table is not None
        if (hit := late.get(entry.handle)) is not None:
            assert hit.filler is not None
            assert hit.filler.table is not None
            chain = hit.filler.table.last.chain()
            self._share(entry, next(node for node in chain if node.depth == hit.blocks), changes)
        self.index.grow(entry.table, -(-end // self._block_tokens))
        self._fill(entry, end)
        entry.watch = len(entry.table.blocks) * self._block_tokens + 1
        if _may_share(entry):
            entry.watch = min(entry.watch, (entry.table.last.depth + 1) * self._block_tokens)

    def _share(self, entry: GroupRequest, node: Node, changes: BlockChanges) -> None:
        assert entry.handle is not None
        assert entry.table is not None
        assert node.owner is not None
        changes.prefixes[entry.handle] = PrefixBlocks(node.owner.handle, node.depth)
        self.index.share(entry.table, node)

    def _fill(self, entry: GroupRequest, computed: int) -> None:
        """Put the blocks that are full of known tokens into the index. Args: computed: positions of the request."""
        table, size = entry.table, self._block_tokens
        assert table is not None
        full, depth = min(computed, len(entry.known) + len(entry.drawn)) // size, table.last.depth
        if full > depth and _may_share(entry):
            self.index.fill(table, block_keys(_tokens(entry, depth * size, full * size), size))

    def _more_blocks(self, row: BatchRow, late: dict[int, PrefixHit]) -> int:
        entry = row.request
        assert entry.handle is not None
        assert entry.table is not None
        hit = late.get(entry.handle)
        has = len(entry.table.blocks) if hit is None else hit.blocks
        return max(0, -(-(row.start + row.count) // self._block_tokens) - has)

    def _common_blocks(self, entry: GroupRequest, row: BatchRow, found: int, most: int) -> int:
        """Return the blocks that a request has in common with those that a row has filled; `found` if that is more."""
        other, size = row.request, self._block_tokens
        most = min(most, min(row.start + row.count, len(other.known)) // size)
        if most <= found or not _may_share(other) or other.request.cache_salt != entry.request.cache_salt:
            return found
        if entry.known[:size] != other.known[:size]:
            return found
        if entry.known[: most * size] == other.known[: most * size]:
            return most
        common = 1
        while entry.known[common * size : (common + 1) * size] == other.known[common * size : (common + 1) * size]:
            common += 1
        return max(found, common)


def _may_hit(entry: GroupRequest) -> bool:
    """Return true if a request may begin with blocks of others."""
    # Log probabilities of a prompt need all of its hidden states.
    return not entry.is_alone and entry.request.sampling.prompt_logprobs is None


def _may_share(entry: GroupRequest) -> bool:
    """Return true if others may begin with the blocks of a request: not if it broke an engine before."""
    return not entry.was_alone


def _tokens(entry: GroupRequest, start: int, end: int) -> Sequence[int]:
    """Return the tokens of a request at some positions, all of which are known."""
    known, drawn = entry.known, entry.drawn
    if end <= len(known):
        return known[start:end]
    return (*known[start:], *drawn[max(0, start - len(known)) : end - len(known)])
