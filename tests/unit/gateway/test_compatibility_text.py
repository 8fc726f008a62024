"""`include_stop_str_in_output` and `skip_special_tokens`: by hand, and against the tokenizers library."""

from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca.core.domain.request import Request
from orca.gateway.render.render import AnswerKind, ChoiceLog, ChoiceStream, RenderModel, RenderOptions, whole_choice
from orca.gateway.render.shown_text import TextFlag
from orca.pool.memory.pool import MemoryPool
from support.gateway import tool_rig
from support.gateway.gateway_rig import (
    FakeScheduler,
    WallClock,
    error_of,
    ids,
    make_request,
    recording,
    rig,
    scripted,
    tokenizer,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = {COMPLETIONS: {"prompt": "the fox"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
READING = RenderModel(tokenizer(), frozenset(ids("<|end|>")))
KEEPS, SHOWS, BOTH = TextFlag.KEEPS_STOP, TextFlag.SHOWS_SPECIAL, TextFlag.KEEPS_STOP | TextFlag.SHOWS_SPECIAL
E = "<|end|>"
U = "<|user|>"


def options(flags: int = 0, kind: AnswerKind = AnswerKind.COMPLETION, **more: Any) -> RenderOptions:
    return RenderOptions(kind=kind, model="tiny", created=1, text_flags=flags or None, **more)


def pieces(request: Request, output: tuple[int, ...], flags: int) -> list[str]:
    """Return the text that each token adds, and that of the end."""
    tokens, end = scripted(request, output)
    log = ChoiceLog(request, options(flags), READING)
    return [*(str(log.push(token)[0]) for token in tokens), str(log.flush(end))]


def text_of(request: Request, output: tuple[int, ...], flags: int = 0) -> str:
    return "".join(pieces(request, output, flags))


BY_HAND: list[tuple[str, dict[str, Any], str, str, str, str]] = [
    # Output, parameters; the text as always, with the stop string, with special tokens, and with both.
    ("one two three", {"stop": (" two",)}, "one", "one two", "one", "one two"),
    ("one two", {"stop": ("ne t",)}, "o", "one t", "o", "one t"),
    ("one", {"stop": ("x",)}, "one", "one", "one", "one"),
    (f"a{U}b", {}, "ab", "ab", f"a{U}b", f"a{U}b"),
    (f"a{U}b{E}", {}, "ab", "ab", f"a{U}b", f"a{U}b{E}"),
    (f"a{E}b", {"ignore_eos": True}, "ab", "ab", f"a{E}b", f"a{E}b"),
    # A stop token id.
    ("one x", {"stop_token_ids": ids("x")}, "one ", "one x", "one ", "one x"),
    (f"a{U}", {"stop_token_ids": ids(U)}, "a", "a", "a", f"a{U}"),
    # Special tokens in stop strings, before them and between their characters.
    (f"a{U}", {"stop": (U,)}, "a", f"a{U}", "a", f"a{U}"),
    (f"a{U}\nb", {"stop": (f"{U}\n",)}, "a", f"a{U}\n", "a", f"a{U}\n"),
    (f"a{U}{U}b", {"stop": (f"{U}b",)}, "a", f"a{U}b", f"a{U}", f"a{U}{U}b"),
    (f"x{U}ab", {"stop": ("ab",)}, "x", "xab", f"x{U}", f"x{U}ab"),
    (f"xa{U}b", {"stop": ("ab",)}, "x", "xab", "x", "xab"),
    (f"xa{U}b", {"stop": (f"a{U}c",)}, "xab", "xab", f"xa{U}b", f"xa{U}b"),
    # Within min_tokens a stop string is text.
    ("abab", {"stop": ("ab",), "min_tokens": 2}, "ab", "abab", "ab", "abab"),
    (f"{U}", {}, "", "", U, U),
]


@pytest.mark.parametrize(
    ("written", "params", "plain", "kept", "shown", "both"), BY_HAND, ids=lambda value: str(value)[:30]
)
def test_the_text_by_hand(written: str, params: dict[str, Any], plain: str, kept: str, shown: str, both: str) -> None:
    request = make_request(**params)
    found = [text_of(request, ids(written), flags) for flags in (0, KEEPS, SHOWS, BOTH)]
    assert found == [plain, kept, shown, both]


def spread(data: st.DataObject) -> tuple[int, ...]:
    """Draw an output: tokens of texts, special ones, and parts of characters."""
    texts = st.sampled_from(["ab", " a", "🐋", "é", "the", U, E, f"a{U}b", f"{U}{U}"])
    parts = st.one_of(texts.map(ids), st.sampled_from(ids("🐋é")).map(lambda one: (one,)))
    return tuple(one for part in data.draw(st.lists(parts, max_size=12)) for one in part)


@given(data=st.data())
def test_without_a_stop_the_text_is_that_of_the_library(data: st.DataObject) -> None:
    output = (*spread(data), *ids("x"))
    request = make_request(ignore_eos=True)
    found = pieces(request, output, SHOWS)
    assert "".join(found) == tokenizer().decode(output, skip_special_tokens=False)
    assert text_of(request, output, KEEPS) == text_of(request, output)


STOPS = ["ab", " a", "🐋", "the", "ba", U, E, f"{U}a", f"b{U}", f"{U}{U}", f"a{U}b", f"{U}\n"]


@given(data=st.data())
def test_with_stops_the_text_is_the_one_of_any_call_and_special_tokens(data: st.DataObject) -> None:
    texts = st.lists(st.sampled_from(["a", "b", " a", "🐋", "the", U, E, "c\n"]), max_size=14)
    output = (*ids("".join(data.draw(texts))), *ids("x"))
    stop = tuple(dict.fromkeys(data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))))
    request = make_request(stop=stop, ignore_eos=True, min_tokens=data.draw(st.integers(0, 3)))
    tokens, end = scripted(request, output)
    plain, shown = text_of(request, output), text_of(request, output, SHOWS)
    assert shown.replace(U, "").replace(E, "") == plain
    # Nothing but the stop string is missing: special tokens before it are there.
    whole = tokenizer().decode([token.id for token in tokens], skip_special_tokens=False)
    assert whole.startswith(shown)
    kept = end.stop if isinstance(end.stop, str) else ""
    assert text_of(request, output, KEEPS) == plain + kept
    assert text_of(request, output, BOTH) == shown + kept
    rest = whole[len(shown) :]
    if kept and U not in kept and E not in kept:
        # The special tokens between its characters do not count; one before it is no part of it.
        assert not rest.startswith((U, E))
        rest = rest.replace(U, "").replace(E, "")
    assert rest.startswith(kept)


def test_special_tokens_wait_only_for_text_and_stop_strings_that_may_go_on() -> None:
    output = ids(f"{U}x a{U}{U}y")
    assert pieces(make_request(ignore_eos=True), output, SHOWS) == [U, "x", " ", "a", U, U, "y", ""]
    waits = make_request(stop=("a\n", f"{U}z"))
    # "a" may begin one stop string, and the special token the other.
    assert pieces(waits, output, SHOWS) == ["", f"{U}x", " ", "", "", "", f"a{U}{U}y", ""]


@pytest.mark.parametrize("flags", [KEEPS, SHOWS, BOTH])
@pytest.mark.parametrize("kind", [AnswerKind.COMPLETION, AnswerKind.CHAT])
@pytest.mark.parametrize("params", [{"stop": ("and", f"{U}x")}, {"logprobs": 1}, {"stop": (f"b{U}",)}], ids=str)
def test_a_second_gateway_writes_the_same_bytes_from_every_index(
    kind: AnswerKind, flags: int, params: dict[str, Any]
) -> None:
    request, how = make_request(**params), options(flags, kind, event_ids=True)
    tokens, end = scripted(request, ids(f"Hello{U} 🐋 b{U} and{E}"))
    first = ChoiceStream(request, how, READING)
    whole = [*map(first.token, tokens), first.end(end)]
    for index in range(len(tokens) + 1):
        second = ChoiceStream(request, RenderOptions.from_json(how.to_json()), READING)
        for token in tokens[:index]:
            second.token(token)
        assert [*map(second.token, tokens[index:]), second.end(end)] == whole[index:]


def test_offsets_of_log_probabilities_count_the_special_tokens() -> None:
    request = make_request("ab", logprobs=0, prompt_logprobs=0)
    tokens, end = scripted(request, ids(f"c{U}d"))
    for flags, text, offsets in ((0, "cd", [0, 1, 1]), (SHOWS, f"c{U}d", [0, 1, 9])):
        for echo, start in ((False, ""), (True, "ab")):
            choice = orjson.loads(whole_choice(request, options(flags, echo=echo), tokens, end, READING).body)
            assert choice["text"] == start + text
            assert choice["logprobs"]["text_offset"][-3:] == [len(start) + offset for offset in offsets]


@pytest.mark.parametrize("path", PATHS)
async def test_calls_have_the_fields(path: str) -> None:
    answer = recording([], f"one{U} two three{E}")
    async with rig(make_scheduler=partial(FakeScheduler, answer=answer)) as one:
        for fields, expected in (
            ({}, "one two three"),
            ({"skip_special_tokens": True, "include_stop_str_in_output": False}, "one two three"),
            ({"skip_special_tokens": False}, f"one{U} two three"),
            ({"include_stop_str_in_output": True}, "one two three"),
            ({"include_stop_str_in_output": True, "skip_special_tokens": False}, f"one{U} two three{E}"),
            ({"stop": " two", "include_stop_str_in_output": True}, "one two"),
            ({"stop": " two", "skip_special_tokens": False}, f"one{U}"),
        ):
            response = await one.post(path, **PATHS[path], max_tokens=50, **fields)
            choice = response.json()["choices"][0]
            assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == expected
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["skip_special_tokens", "include_stop_str_in_output"])
async def test_the_fields_wait_for_the_schema_whose_gateways_know_them(name: str) -> None:
    pool = MemoryPool(WallClock())
    await pool.set_schema(2)
    async with rig(pool=pool) as one:
        value = name == "include_stop_str_in_output"
        status, error = error_of(await one.post(COMPLETIONS, prompt="a", **{name: value}))
        assert (status, error["param"]) == (400, name)
        assert (await one.post(COMPLETIONS, prompt="a", max_tokens=1, **{name: not value})).status_code == 200


@pytest.mark.parametrize("name", ["mistral", "mistral_args"])
async def test_markers_that_are_special_tokens_are_still_read(name: str) -> None:
    template = tool_rig.template(name)
    for answer in tool_rig.ANSWERS[name]:
        async with tool_rig.tool_rig(template, answer.text + "<|python_tag|>") as one:
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": tool_rig.TOOLS, "max_tokens": 200}
            message = (await one.post(CHAT, **body, skip_special_tokens=False)).json()["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        assert calls == list(answer.calls)
        assert "[TOOL_CALLS]" not in (message["content"] or "")
        assert (message["content"] or "").endswith("<|python_tag|>")


async def test_a_marker_that_begins_no_call_is_shown() -> None:
    async with tool_rig.tool_rig(tool_rig.template("mistral"), "So: [TOOL_CALLS] none") as one:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": tool_rig.TOOLS, "max_tokens": 200}
        for fields, expected in (({}, "So:  none"), ({"skip_special_tokens": False}, "So: [TOOL_CALLS] none")):
            message = (await one.post(CHAT, **body, **fields)).json()["choices"][0]["message"]
            assert message["content"] == expected
