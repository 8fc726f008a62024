"""`orca bench turns`: the prompts of conversations, what their clients see, and the counts of computed tokens."""

import argparse
import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import orjson
import pytest

from orca.bench import main as bench
from orca.bench.peers.workload import PeerWorkload
from orca.bench.turns.calls import CallFailed, ConversationRun, TurnOutcome, converse
from orca.bench.turns.compare import CacheRun, TurnComparison
from orca.bench.turns.conversations import ConversationSpec, conversations
from orca.bench.turns.trace import conversation_trace
from orca.bench.turns.variants import CacheUse, beginnings, prompt_tokens_by_epoch
from orca.core.domain.errors import SettingError
from orca.planner.workload.lengths import Range
from support.bench.fake_completions import HEAD, chunk, event, serving, token

SPEC = ConversationSpec(
    conversations=3, turns=3, system_tokens=20, question_tokens=Range(2, 5), answer_tokens=Range(1, 4)
)


def prompts(spec: ConversationSpec) -> list[list[list[int]]]:
    """The prompts of each turn of each conversation, with answers of zeros."""
    found = []
    for each in conversations(spec):
        found.append([])
        for turn in each.turns:
            found[-1].append(each.prompt(turn, 1000))
            each.hear([0] * turn.answer_tokens)
    return found


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    held = prompts(SPEC)
    system = held[0][0][:20]
    for own, each in zip(held, conversations(SPEC), strict=True):
        assert all(prompt[:20] == system for prompt in own)
        for before, turn, after in zip(own, each.turns, own[1:], strict=False):
            answered = len(before) + turn.answer_tokens
            assert after[:answered] == [*before, *[0] * turn.answer_tokens]
            assert len(after) - answered in range(2, 6)
    assert len({tuple(prompt) for own in held for prompt in own}) == 9
    assert max(len(own[-1]) for own in held) + 4 <= SPEC.longest == 20 + 3 * 9


def test_prompts_that_share_nothing_have_the_same_lengths() -> None:
    shared, different = prompts(SPEC), prompts(replace(SPEC, is_shared=False))
    assert [[len(prompt) for prompt in own] for own in shared] == [[len(prompt) for prompt in own] for own in different]
    assert len({tuple(prompt[:2]) for own in different for prompt in own}) == 9


async def test_the_client_sends_answers_back_and_notes_what_was_found() -> None:
    seen: list[list[int]] = []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        prompt, count = body["prompt"], body["max_tokens"]
        assert isinstance(prompt, list)
        assert isinstance(count, int)
        seen.append(prompt)
        usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": len(prompt) // 2}}
        events = [*[token(7)] * count, event({"choices": [], "usage": usage}), event(b"[DONE]")]
        writer.write(HEAD + b"".join(map(chunk, events)))

    spec = replace(SPEC, conversations=1)
    async with serving(answer) as target:
        run = await converse(target, spec)
    assert [len(prompt) for prompt in seen] == [turn.prompt_tokens for turn in run.turns]
    for turn, before, after in zip(run.turns, seen, seen[1:], strict=False):
        assert after[: len(before) + len(turn.tokens)] == [*before, *turn.tokens]
    assert {token_id for turn in run.turns for token_id in turn.tokens} == {7}
    assert run.cached_share == sum(len(prompt) // 2 for prompt in seen) / sum(map(len, seen))
    assert all(0 < turn.first_s <= turn.last_s <= run.seconds for turn in run.turns)


async def test_a_call_that_fails_ends_the_run() -> None:
    async def answer(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 503 Busy\r\n\r\n{"error": {"message": "no stage"}}')

    async with serving(answer) as target:
        with pytest.raises(CallFailed, match="HTTP 503: no stage"):
            await converse(target, replace(SPEC, conversations=1))


def test_rows_of_known_tokens_count_for_their_epoch() -> None:
    def line(epoch: int, *rows: list[object]) -> bytes:
        return orjson.dumps({"epoch": epoch, "step": 1, "rows": rows})

    lines = [
        line(1, ["a", "initiation", 0, 9], ["b", "increment", 5, 1]),
        line(1, ["a", "initiation", 9, 3]),
        line(2, ["a", "initiation", 0, 14], ["b", "initiation", 16, 2]),
    ]
    assert prompt_tokens_by_epoch(lines) == {1: 12, 2: 16}
    assert (beginnings(lines, after=1), beginnings(lines, after=2)) == ({"a": 0, "b": 16}, {})


def run(cache: CacheUse, number: int, *tokens: tuple[int, ...], first_s: float = 1.0, seconds: float = 2.0) -> CacheRun:
    """A run of one conversation with an answer per turn."""
    turns = [
        TurnOutcome(
            conversation=0,
            turn=turn,
            prompt_tokens=10,
            cached_tokens=5,
            first_s=first_s * turn,
            last_s=9.0,
            tokens=answer,
        )
        for turn, answer in enumerate(tokens, 1)
    ]
    whole = ConversationRun(seconds=seconds, turns=turns)
    return CacheRun(cache=cache, round=number, run=whole, computed_tokens=3, memory_bytes=100)


def test_the_two_systems_are_compared_round_by_round() -> None:
    comparison = TurnComparison(
        [
            run(CacheUse.ON, 1, (1,), (2,), first_s=0.5, seconds=1.0),
            run(CacheUse.OFF, 1, (1,), (2,), first_s=2.0),
            run(CacheUse.OFF, 2, (1,), (2,), first_s=3.0),
            run(CacheUse.ON, 2, (1,), (2,), seconds=0.5),
        ]
    )
    assert comparison.ratios(lambda each: each.tokens_per_s) == [2.0, 4.0]
    assert comparison.sooner(2) == [4.0, 3.0]
    assert comparison.different_answers == 0


def test_only_the_first_difference_of_a_conversation_counts() -> None:
    comparison = TurnComparison([run(CacheUse.ON, 1, (1,), (2,), (3,)), run(CacheUse.OFF, 1, (1,), (8,), (9,))])
    assert comparison.different_answers == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--kill worker", "--kill is for --repair"),
        ("--prompt-tokens 100", "--prompt-tokens is for --choices and --repair"),
        ("--choices 8 --kill worker", "--kill is for --repair"),
        ("--choices 8 --no-shared", "--no-shared is for conversations: leave --choices out"),
        ("--groups 2", "--groups is for --trace"),
        ("--trace FILE --no-shared", "--no-shared is for conversations: leave --trace out"),
        ("--trace FILE -- --stages 2", "--trace runs on simulated stages"),
        ("--trace FILE", "FILE cannot be read"),
        ("-- --prefix-cache true", "--prefix-cache is set by this bench"),
        ("-- --iteration-log=here", "--iteration-log is set by this bench"),
    ],
)
def test_options_that_do_not_fit_are_named(words: str, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        bench.main(["turns", *words.split()])


def test_a_fixed_trace_has_the_first_turns_of_all_conversations_then_the_second_ones() -> None:
    trace = conversation_trace(SPEC, 1000)
    asked = [trace.prompt(request.index, 1000) for request in trace.requests]
    assert [len(prompt) for prompt in asked] == [request.prompt_tokens for request in trace.requests]
    assert [request.arrival_s for request in trace.requests] == [0.0] * 9
    for place, each in enumerate(conversations(SPEC)):
        own = asked[place :: SPEC.conversations]
        assert [request.new_tokens for request in trace.requests[place::3]] == [
            turn.answer_tokens for turn in each.turns
        ]
        assert all(after[: len(before)] == before for before, after in pairwise(own))
    workload = PeerWorkload.of(trace, Path("model"), 1000, batch_size=2, threads=1)
    assert (workload.is_shared, workload.prompts) == (True, asked)
    assert not {tuple(prompt[:8]) for prompt in workload.head(9).prompts} & {tuple(prompt[:8]) for prompt in asked}


@pytest.mark.parametrize("given", ["--rate 2", "--task T", "--prompt-tokens 7"])
def test_a_comparison_of_peers_has_one_kind_of_requests(given: str) -> None:
    options = argparse.Namespace(
        turns=2, rate=None, preset=None, prompt_tokens=None, new_tokens=None, task=None, lengths=None
    )
    name = given.split()[0]
    setattr(options, name.removeprefix("--").replace("-", "_"), 7)
    with pytest.raises(SettingError, match=f"--turns names the requests already: leave {name} out"):
        bench._peers_spec(options)
