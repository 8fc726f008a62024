"""The index of prefixes: what it finds, what it keeps, and in which order blocks go."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orca.scheduler.policy.prefix_index import BlockTable, Node, PrefixIndex, block_keys, check_index, shared_blocks
from support.effort import tries

BLOCK = 2


class Requests:
    """Requests on an index, each with its tokens."""

    def __init__(self, blocks: int) -> None:
        self.index = PrefixIndex(blocks)
        self.tables: dict[int, BlockTable] = {}
        self.tokens: dict[int, list[int]] = {}
        self.handles = 0

    def begin(self, tokens: Sequence[int], *, salt: str | None = None, matched: bool = True) -> tuple[int, int]:
        """Begin a request and run all of its tokens. Returns: its handle, and the blocks that it did not compute."""
        self.handles += 1
        handle, index = self.handles, self.index
        node = self.match(tokens, salt) if matched else None
        table = self.tables[handle] = index.begin(handle, salt)
        self.tokens[handle] = []
        if node is not None:
            index.share(table, node)
        self.run(handle, tokens)
        return handle, 0 if node is None else node.depth

    def run(self, handle: int, tokens: Sequence[int]) -> None:
        """Run further tokens of a request."""
        table, index = self.tables[handle], self.index
        self.tokens[handle] += tokens
        blocks = -(-len(self.tokens[handle]) // BLOCK)
        index.make_room(max(0, blocks - len(table.blocks)))
        index.grow(table, blocks)
        index.fill(table, list(block_keys(self.tokens[handle], BLOCK))[table.last.depth :])

    def match(self, tokens: Sequence[int], salt: str | None = None) -> Node | None:
        return self.index.match(salt, block_keys(tokens, BLOCK), (len(tokens) - 1) // BLOCK)

    def end(self, handle: int) -> int:
        del self.tokens[handle]
        return self.index.end(self.tables.pop(handle))


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [([1, 2, 3, 4, 9], 2), ([1, 2, 3, 4], 1), ([1, 2, 3, 9, 9], 1), ([9, 2, 3, 4, 5], 0), ([1, 2], 0)],
    ids=["all of it", "the last token is computed", "a part", "another beginning", "one block"],
)
def test_a_request_begins_with_the_longest_chain_that_is_known(tokens: list[int], blocks: int) -> None:
    requests = Requests(100)
    requests.begin([1, 2, 3, 4, 5])
    assert requests.begin(tokens)[1] == blocks


def test_blocks_of_an_ended_request_are_found_and_what_nobody_can_find_is_free() -> None:
    requests = Requests(100)
    handle, _ = requests.begin([1, 2, 3, 4, 5])
    assert requests.index.free == 97
    assert requests.end(handle) == 2
    assert (requests.index.free, requests.index.cached) == (98, 2)
    assert requests.begin([1, 2, 3, 4, 5])[1] == 2
    assert (requests.index.free, requests.index.cached) == (97, 0)


def test_a_request_shorter_than_a_block_leaves_nothing() -> None:
    requests = Requests(100)
    handle, _ = requests.begin([1], salt="s")
    assert requests.end(handle) == 0
    check_index(requests.index)
    assert requests.index.free == 100


def test_salts_share_nothing() -> None:
    requests = Requests(100)
    for salt, blocks in ((None, 0), ("a", 0), ("b", 0), ("a", 1), (None, 1)):
        assert requests.begin([1, 2, 3], salt=salt)[1] == blocks


def test_generated_tokens_are_found_too() -> None:
    requests = Requests(100)
    handle, _ = requests.begin([1, 2, 3])
    requests.run(handle, [4, 5, 6])
    assert requests.begin([1, 2, 3, 4, 5, 6, 7])[1] == 3


def test_the_least_recently_used_leaf_goes_first() -> None:
    requests = Requests(6)
    first, _ = requests.begin([1, 2, 3, 4])
    second, _ = requests.begin([5, 6, 7, 8])
    requests.end(second)
    requests.end(first)
    assert requests.index.free == 2
    third, _ = requests.begin([9] * 6)
    assert requests.index.take_shrunk() == {second: 1}
    requests.end(third)
    assert requests.begin([1, 2, 3, 4, 5])[1] == 2
    assert requests.index.take_shrunk() == {second: 0}


def test_a_table_that_shrinks_twice_is_told_once() -> None:
    requests = Requests(4)
    handle, _ = requests.begin([1, 2, 3, 4, 5, 6])
    requests.end(handle)
    requests.begin([7] * 8)
    assert requests.index.take_shrunk() == {handle: 0}
    assert requests.index.evictions == 3


def test_blocks_of_living_requests_stay() -> None:
    requests = Requests(4)
    handle, _ = requests.begin([1, 2, 3, 4])
    requests.begin([1, 2, 3, 4, 5])
    requests.end(handle)
    assert (requests.index.free, requests.index.cached) == (1, 0)
    with pytest.raises(IndexError):
        requests.index.make_room(2)


def test_of_two_that_computed_the_same_the_living_one_has_the_node() -> None:
    requests = Requests(8)
    first, _ = requests.begin([1, 2, 3, 4])
    second, _ = requests.begin([1, 2, 3, 4], matched=False)
    assert requests.index.free == 4
    assert requests.end(first) == 0, "the other one has the same tokens"
    assert requests.index.free == 6
    third, blocks = requests.begin([1, 2, 3, 4, 5])
    assert blocks == 2
    assert requests.end(second) == 2
    assert requests.end(third) == 0, "it owns no node"
    assert (requests.index.free, requests.index.cached) == (6, 2)


def test_a_request_that_computes_what_is_cached_takes_its_place() -> None:
    requests = Requests(8)
    first, _ = requests.begin([1, 2, 3, 4, 5, 6])
    requests.end(first)
    second, blocks = requests.begin([1, 2, 3, 4])
    assert blocks == 1, "its last token is computed, and with it the second block"
    assert requests.index.take_shrunk() == {}, "the first one still has the third block"
    requests.index.make_room(6)
    assert requests.index.take_shrunk() == {first: 1}
    check_index(requests.index)
    assert requests.end(second) == 2


def test_blocks_that_were_not_filled_are_forgotten() -> None:
    requests = Requests(8)
    handle, _ = requests.begin([1, 2, 3, 4, 5])
    requests.index.forget(requests.tables[handle])
    check_index(requests.index)
    assert requests.begin([1, 2, 3, 4, 5])[1] == 0
    assert requests.end(handle) == 0


def test_the_heap_of_leaves_does_not_grow_with_time() -> None:
    requests = Requests(8)
    for _ in range(1_000):
        requests.end(requests.begin([1, 2, 3])[0])
    assert len(requests.index.leaves) < 200


class AnyHistory(RuleBasedStateMachine):
    """Requests that begin, run and end in any order, with few different tokens and little memory.

    Blocks that several have are charged once: whatever else is admitted is admitted then too.
    """

    BLOCKS = 12

    def __init__(self) -> None:
        super().__init__()
        self.requests = Requests(self.BLOCKS)
        self.reserved: dict[int, int] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        more=st.integers(0, 6),
        salt=st.none() | st.just("s"),
        matched=st.booleans(),
    )
    def begin(self, tokens: list[int], more: int, salt: str | None, matched: bool) -> None:
        reserved = -(-(len(tokens) + more) // BLOCK)
        if sum(self.reserved.values()) - shared_blocks(self.requests.index) + reserved <= self.BLOCKS:
            handle, blocks = self.requests.begin(tokens, salt=salt, matched=matched)
            assert blocks * BLOCK < len(tokens)
            self.reserved[handle] = reserved

    @rule(token=st.integers(0, 1), place=st.integers(0, 20))
    def run_one(self, token: int, place: int) -> None:
        able = [handle for handle, blocks in self.reserved.items() if self._length(handle) < blocks * BLOCK]
        if able:
            self.requests.run(able[place % len(able)], [token])

    @rule(place=st.integers(0, 20))
    def end(self, place: int) -> None:
        if self.reserved:
            handle = list(self.reserved)[place % len(self.reserved)]
            del self.reserved[handle]
            self.requests.end(handle)

    @invariant()
    def all_adds_up(self) -> None:
        check_index(self.requests.index)
        assert all(blocks >= 0 for blocks in self.requests.index.take_shrunk().values())

    def _length(self, handle: int) -> int:
        return len(self.requests.tokens[handle])


AnyHistory.TestCase.settings = settings(max_examples=tries(200), stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
