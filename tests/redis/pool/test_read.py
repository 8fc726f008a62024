"""One read is bounded for logs of any length and number: Redis answers no other client meanwhile."""

import pytest

from orca.core.domain.request import End, FinishReason, Logprob, Token
from orca.pool.contract import READ_BYTES_MAX, READ_TOKENS_MAX
from orca.pool.records import CommitEntry, LogSlice
from support.pool.beds import Bed, started
from support.pool.kinds import KINDS

pytestmark = pytest.mark.parametrize("make_bed", KINDS, indirect=True)
LONG = 1_500
assert LONG < READ_TOKENS_MAX < 2 * LONG


async def written(bed: Bed, *parents: str, tokens: tuple[Token, ...]) -> None:
    """Requests that have ended behind these tokens."""
    _, owned = await started(bed, *parents, max_new_tokens=len(tokens))
    end = End(FinishReason.LENGTH, len(tokens))
    for claimed in owned.values():
        entry = CommitEntry(request_id=claimed.request.id, claim=claimed.claim, index=0, tokens=tokens, end=end)
        await bed.pool.commit([entry])


async def test_logs_share_the_bound_of_one_read_and_the_next_read_continues(bed: Bed) -> None:
    tokens = tuple(Token(i) for i in range(LONG))
    await written(bed, "a", "b", "c", tokens=tokens)
    first = await bed.pool.read_many({"a.0": 0, "b.0": 0, "c.0": 0}, 10**6)
    room = READ_TOKENS_MAX - LONG
    assert (first["a.0"].tokens, first["a.0"].end, first["a.0"].is_cut) == (tokens, End("length", LONG), False)
    assert (first["b.0"].tokens, first["b.0"].end, first["b.0"].is_cut) == (tokens[:room], None, True)
    assert (first["c.0"].tokens, first["c.0"].end, first["c.0"].is_cut) == ((), None, True)
    then = await bed.pool.read_many({"b.0": room, "c.0": 0}, 10**6)
    assert (then["b.0"].tokens, then["b.0"].end) == (tokens[room:], End("length", LONG))
    assert (then["c.0"].tokens, then["c.0"].is_cut) == (tokens[: READ_TOKENS_MAX - (LONG - room)], True)


async def test_an_unchanged_log_is_left_out_also_at_the_bound_of_a_read(bed: Bed) -> None:
    await written(bed, "a", "b", tokens=tuple(Token(i) for i in range(READ_TOKENS_MAX)))
    found = await bed.pool.read_many({"a.0": 0, "b.0": READ_TOKENS_MAX + 1, "x.0": 0}, 10**6)
    assert (sorted(found), found["x.0"]) == (["a.0", "x.0"], None)


async def test_an_end_right_at_the_bound_of_a_read_is_included(bed: Bed) -> None:
    await written(bed, "a", tokens=tuple(Token(i) for i in range(READ_TOKENS_MAX)))
    found = await bed.pool.read("a.0", 0, 10**6)
    assert (len(found.tokens), found.end, found.is_cut) == (READ_TOKENS_MAX, End("length", READ_TOKENS_MAX), False)


async def test_large_tokens_reach_the_bound_of_a_read_sooner_and_one_is_always_read(bed: Bed) -> None:
    scored = Logprob(7, -0.5, tuple((i, -0.5) for i in range(20)))
    heavy = Token(5, None, (scored,) * (READ_BYTES_MAX // 256 // 2))
    await written(bed, "a", "b", "c", tokens=(heavy, Token(6)))
    found = await bed.pool.read_many({"a.0": 0, "b.0": 0, "c.0": 0})
    assert [len(log.tokens) for log in found.values()] == [2, 1, 0]
    assert [log.is_cut for log in found.values()] == [False, True, True]


async def test_one_read_returns_plain_and_other_logs_in_the_asked_order(bed: Bed) -> None:
    _, owned = await started(bed, "a", "b", "c", "d")
    scored = Token(7, Logprob(7, -0.5, ((7, -0.5), (8, -1.5))))
    logs = {"a.0": (Token(3), Token(4)), "b.0": (scored, Token(12)), "c.0": (Token(5),), "d.0": (Token(0),)}
    ends = {"c.0": End(FinishReason.LENGTH, 1)}
    for name, tokens in logs.items():
        claim, end = owned[name].claim, ends.get(name)
        await bed.pool.commit([CommitEntry(request_id=name, claim=claim, index=0, tokens=tokens, end=end)])
    found = await bed.pool.read_many({"c.0": 0, "x.0": 0, "b.0": 0, "a.0": 1, "d.0": 0})
    assert list(found) == ["c.0", "x.0", "b.0", "a.0", "d.0"]
    assert found == {
        "c.0": LogSlice(0, logs["c.0"], ends["c.0"]),
        "x.0": None,
        "b.0": LogSlice(0, logs["b.0"], None),
        "a.0": LogSlice(1, logs["a.0"][1:], None),
        "d.0": LogSlice(0, logs["d.0"], None),
    }
