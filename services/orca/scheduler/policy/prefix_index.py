"""The prefix index: which KV blocks hold which tokens, so that a group computes a common prefix once.

It mirrors the block tables of the ranks (worker/stage/kv_cache.py), which do what the steps say. It knows three things:

    blocks   the memory. A block is free, or in the tables of one or more requests.
    tables   the blocks of each request, in the order of its positions. The table of a living request grows with it. A
             request that ended leaves a kept table if the index needs its first blocks.
    nodes    a trie of full blocks. The key of a node is its parent and the token ids of its block, so two different
             prefixes never meet, and there are no hashes that could collide. Each salt has a root of its own.

The first `depth` blocks in the table of a node's owner hold the tokens from the root to the node. So a handle and a
number of blocks name them, and no stage needs tokens to share blocks.

Requests may compute the same tokens side by side. Then the node has one block, and the tables of the other living
requests are its duplicates. One of them becomes the owner if no living request has the node's block any more. So a node
is idle only if no living request needs it, and all nodes below an idle one are idle.

Blocks of idle nodes lie in memory that no living request has taken. When a table grows and no block is free, the least
recently used idle leaf is evicted. Living requests have at most what is reserved for them, so there always is one.
"""

import heapq
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice


@dataclass(slots=True, eq=False)
class KvBlock:
    """A KV block that is not free."""

    tables: int = 1  # number of tables that have this block
    living: int = 1  # number of those whose requests have not ended


@dataclass(slots=True, eq=False)
class Node:
    """A full block in the trie, or a root, which has no block."""

    parent: "Node | None"
    key: bytes  # its token ids (`block_keys`); of a root empty
    owner: "BlockTable | None"  # None: a root, or a node that was evicted
    depth: int  # blocks from the root down to this one
    used: int = 0  # time at which the last living request left it
    children: "dict[bytes, Node]" = field(default_factory=dict)
    # Living tables that have these tokens in another block. Nearly all nodes have none, so none has a list.
    duplicates: "tuple[BlockTable, ...]" = ()

    @property
    def block(self) -> KvBlock:
        assert self.owner is not None
        return self.owner.blocks[self.depth - 1]

    @property
    def is_idle(self) -> bool:
        """True if no living request has its block; False for roots and evicted nodes."""
        return self.owner is not None and not self.block.living

    def chain(self) -> "Iterator[Node]":
        """Yield this node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of a request.

    Args:
        last: the node of its newest block in the trie; `NOWHERE` before the first one.
    """

    handle: int
    salt: str | None
    last: Node
    is_living: bool = True
    blocks: list[KvBlock] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)  # depths of the nodes that it owns, rising


NOWHERE = Node(None, b"", None, 0)
"""The last node of a table of which no block is in the trie."""


def block_keys(tokens: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """Yield the key of each full block of some tokens. Args: tokens: ids from 0 to 2^31 - 1.

    Tokens are converted when their keys are asked for: most lookups end far before the end of a long prompt.
    """
    width, converted = 4 * block_tokens, _CONVERTED_BLOCKS * block_tokens
    for start in range(0, len(tokens), converted):
        keys = array("i", tokens[start : start + converted]).tobytes()
        for end in range(width, len(keys) + 1, width):
            yield keys[end - width : end]


_CONVERTED_BLOCKS = 16
"""Blocks whose keys are made at once."""

_SPARE_LEAVES = 64
"""Entries of the heap of leaves that may be stale, besides as many as there are nodes."""


class IdleLeaves:
    """Idle leaves by the time of their last use. An entry may be stale: its node is in use again, or has children."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._ties = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, node: Node) -> bool:
        return any(entry is node and _is_leaf_since(node, used) for used, _, entry in self._heap)

    def add(self, node: Node, nodes: int) -> None:
        """Add an idle node if it is a leaf. Args: nodes: in the trie; far more entries than that are not kept."""
        if node.children:
            return
        heapq.heappush(self._heap, (node.used, next(self._ties), node))
        if len(self._heap) > 2 * nodes + _SPARE_LEAVES:
            self._heap = [entry for entry in self._heap if _is_leaf_since(entry[2], entry[0])]
            heapq.heapify(self._heap)

    def pop(self) -> Node:
        """Remove and return the leaf that was used least recently. Raises: IndexError if there is none."""
        while True:
            used, _, node = heapq.heappop(self._heap)
            if _is_leaf_since(node, used):
                return node


class PrefixIndex:
    """The index of one epoch.

    Args:
        blocks: of the group's memory, on every rank the same.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks
        self.cached = 0  # blocks that only kept tables have
        self.taken = 0  # blocks of living requests, those that several have counted for each of them
        self.nodes = 0
        self.evictions = 0  # nodes evicted so far
        self.tables: dict[int, BlockTable] = {}  # by handle; living and kept ones
        self.roots: dict[str | None, Node] = {}  # by salt
        self._shrunk: dict[int, int] = {}  # kept tables of which blocks go with the next step, and how many stay
        self.leaves = IdleLeaves()
        self._now = 0

    def match(self, salt: str | None, keys: Iterable[bytes], blocks_max: int) -> Node | None:
        """Return the node of the longest known chain of blocks; None if not even the first one is known."""
        root = node = self.roots.get(salt)
        for key in islice(keys, blocks_max):
            if node is None or (child := node.children.get(key)) is None:
                break
            node = child
        return None if node is root else node

    def begin(self, handle: int, salt: str | None) -> BlockTable:
        """Begin the table of a request."""
        table = self.tables[handle] = BlockTable(handle, salt, NOWHERE)
        return table

    def share(self, table: BlockTable, node: Node) -> None:
        """Give a table without blocks those of a chain."""
        assert node.owner is not None
        assert not table.blocks
        table.blocks = node.owner.blocks[: node.depth]
        table.last = node
        self.taken += node.depth
        for block in table.blocks:
            self.cached -= not block.living
            block.tables += 1
            block.living += 1
        for each in node.chain():
            if each.block is not table.blocks[each.depth - 1]:
                self._duplicate(each, table)

    def grow(self, table: BlockTable, blocks: int) -> None:
        """Give a table free blocks until it has so many. `make_room` comes before."""
        more = blocks - len(table.blocks)
        assert more <= self.free
        if more > 0:
            self.free -= more
            self.taken += more
            table.blocks += [KvBlock() for _ in range(more)]

    def fill(self, table: BlockTable, keys: Iterable[bytes]) -> None:
        """Put the next blocks of a table into the trie. Args: keys: of the blocks behind `table.last`."""
        node = table.last
        for key in keys:
            if node is NOWHERE:
                node = self.roots.setdefault(table.salt, Node(None, b"", None, 0))
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, table, node.depth + 1)
                table.owned.append(child.depth)
                self.nodes += 1
            else:
                self._duplicate(child, table)
            node = child
        table.last = node

    def forget(self, table: BlockTable) -> None:
        """Take the nodes of a table out of the trie, as far as nobody else uses them: its blocks are not filled."""
        for node in list(table.last.chain()):
            if node.owner is not table or node.children or node.duplicates or node.block.tables > 1:
                return
            parent = self._remove(node, table)
            table.last = parent if parent.depth else NOWHERE

    def end(self, table: BlockTable) -> int:
        """Take a request out of the living ones. Returns: the blocks of its table that stay; 0: the table is gone."""
        self._now += 1
        self.taken -= len(table.blocks)
        for block in table.blocks:
            block.living -= 1
            self.cached += not block.living
        chain = list(table.last.chain())
        for node in chain:
            if node.block is not table.blocks[node.depth - 1]:
                node.duplicates = tuple(each for each in node.duplicates if each is not table)
            elif node.duplicates and not node.block.living:
                self._hand_over(node, node.duplicates[-1])
        table.is_living = False
        self._shrink(table)
        self._shrunk.pop(table.handle, None)  # the step that ends a request says how much of its table stays
        for node in chain:
            if node.is_idle:
                node.used = self._now
        if chain and chain[0].is_idle:
            self.leaves.add(chain[0], self.nodes)
        return len(table.blocks)

    def make_room(self, blocks: int) -> None:
        """Evict idle leaves, the least recently used first, until so many blocks are free."""
        while self.free < blocks:
            self._evict(self.leaves.pop(), blocks - self.free)

    def take_shrunk(self) -> dict[int, int]:
        """Return the kept tables that have shrunk since the last call, and their blocks now. The next step says so."""
        shrunk, self._shrunk = self._shrunk, {}
        return shrunk

    def _duplicate(self, node: Node, table: BlockTable) -> None:
        """Note that a living table has the tokens of a node in a block of its own."""
        if node.is_idle:
            self._hand_over(node, table)
        else:
            node.duplicates = (*node.duplicates, table)

    def _hand_over(self, node: Node, table: BlockTable) -> None:
        """Make a table the owner of a node, which then has its block."""
        before = node.owner
        assert before is not None
        before.owned.remove(node.depth)
        insort(table.owned, node.depth)
        node.owner = table
        node.duplicates = tuple(each for each in node.duplicates if each.blocks[node.depth - 1] is not node.block)
        if not before.is_living:
            self._shrink(before)

    def _shrink(self, table: BlockTable) -> None:
        """Drop the blocks of a table that the index does not need; its request has ended."""
        needed = table.owned[-1] if table.owned else 0
        if table.blocks[needed:]:
            self._shrunk[table.handle] = needed
        for block in table.blocks[needed:]:
            block.tables -= 1
            if not block.tables:
                self.free += 1
                self.cached -= 1
        del table.blocks[needed:]
        if not needed:
            del self.tables[table.handle]

    def _evict(self, leaf: Node, most: int) -> None:
        """Evict a leaf, and then the nodes above it, the next ones to go, as far as the same table owns them.

        Args: most: nodes; each of them frees a block.
        """
        owner, node = leaf.owner, leaf
        assert owner is not None
        for _ in range(most):
            node = self._remove(node, owner)
            self.evictions += 1
            # A request that ended has left all of these at one time. A root has no owner.
            is_next = node.owner is owner and node.used == leaf.used and not node.children
            if not is_next or owner.blocks[node.depth - 1].living:
                break
        self._shrink(owner)
        if node.is_idle:
            self.leaves.add(node, self.nodes)

    def _remove(self, leaf: Node, owner: BlockTable) -> Node:
        """Take a leaf out of the trie. Returns: the node above it."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        owner.owned.pop()  # it owns nothing below a leaf
        leaf.owner = None
        self.nodes -= 1
        if parent.parent is None and not parent.children:
            del self.roots[owner.salt]
        return parent


def held_blocks(index: PrefixIndex) -> int:
    """Return the number of blocks that living requests have, each counted once."""
    return index.blocks - index.free - index.cached


def shared_blocks(index: PrefixIndex, leaving: Sequence[BlockTable] = ()) -> int:
    """Return how often living requests have a block that another one has: in k of their tables it counts k - 1 times.

    Args: leaving: tables of living requests that are counted as ended.
    """
    gone = Counter(block for table in leaving for block in table.blocks)
    held = held_blocks(index) - sum(block.living == tables for block, tables in gone.items())
    return index.taken - gone.total() - held


def _is_leaf_since(node: Node, used: int) -> bool:
    return node.is_idle and not node.children and node.used == used


def _below(node: Node) -> Iterator[Node]:
    """Yield all nodes below a node."""
    for child in node.children.values():
        yield child
        yield from _below(child)


def check_index(index: PrefixIndex) -> None:
    """Recount every invariant. Raises: AssertionError."""
    tables = index.tables.values()
    blocks = {id(block): block for table in tables for block in table.blocks}
    assert index.free == index.blocks - len(blocks), "free blocks miscounted"
    assert index.cached == sum(not block.living for block in blocks.values()), "cached blocks miscounted"
    assert index.taken == sum(block.living for block in blocks.values()), "blocks taken miscounted"
    for block in blocks.values():
        having = [table for table in tables if block in table.blocks]
        assert block.tables == len(having), "tables of a block miscounted"
        assert block.living == sum(table.is_living for table in having), "living tables of a block miscounted"
    nodes = [node for root in index.roots.values() for node in _below(root)]
    assert index.nodes == len(nodes), "nodes miscounted"
    assert all(root.children for root in index.roots.values()), "a root without nodes"
    for node in nodes:
        assert node.owner is not None, "a node in the trie has no owner"
        assert index.tables[node.owner.handle] is node.owner, "the table of a node is gone"
        assert not (node.is_idle and node.duplicates), "a living request needs an idle node"
        assert not node.is_idle or all(child.is_idle for child in node.children.values()), "an idle node is needed"
        assert (node.is_idle and not node.children) == (node in index.leaves), "a leaf that cannot be evicted"
    for table in tables:
        owned = [node.depth for node in nodes if node.owner is table]
        assert sorted(owned) == table.owned, "owned nodes miscounted"
        assert table.is_living or len(table.blocks) == table.owned[-1], "a kept table has more than is needed"
        for node in table.last.chain() if table.is_living else ():
            is_own = node.block is table.blocks[node.depth - 1]
            assert node.duplicates.count(table) == (not is_own), "a duplicate is missing, or is none"
