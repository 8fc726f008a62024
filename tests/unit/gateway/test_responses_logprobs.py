"""Log probabilities of the Responses API: those of a message's tokens, equal wherever they are read."""

import functools
import itertools
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca.core.domain.request import Request
from orca.gateway.formats.marked_text import Markers
from orca.gateway.formats.parser import AnswerParser
from orca.gateway.formats.tables import stored_formats
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import Rig, WallClock, error_of
from support.gateway.tool_rig import ANSWERS, FORMATS, MALFORMED, PLAIN, template, tokenizer, tool_rig

PATH = "/v1/responses"
INCLUDE = ["message.output_text.logprobs"]
TOOLS: list[Any] = [{"type": "function", "name": name} for name in ("get_weather", "now")]


def client_of(one: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://orca/v1", api_key="none", http_client=one.client)


def text_of(logprobs: list[dict[str, Any]]) -> str:
    """The text of the tokens."""
    return b"".join(bytes(entry["bytes"]) for entry in logprobs).decode()


def events_of(stream: str) -> list[dict[str, Any]]:
    return [orjson.loads(block.split("\n")[1].removeprefix("data: ")) for block in stream.split("\n\n")[:-1]]


@pytest.mark.parametrize(
    "answer", ["It rains. é 🐋", *[answer.text for answer in ANSWERS["hermes"]], *MALFORMED["hermes"][:2], "a <tool_ca"]
)
@pytest.mark.parametrize("thought", ["", "<think>\nhm, é\n</think>\n\n"])
async def test_a_message_has_those_of_its_text(answer: str, thought: str) -> None:
    pool, source = MemoryPool(WallClock()), template("hermes", thinks=True)
    async with (
        tool_rig(source, thought + answer, pool=pool) as one,
        tool_rig(source, pool=pool, schedules=False) as two,
    ):
        body = {"input": "hi", "tools": TOOLS, "max_output_tokens": 400, "include": INCLUDE, "top_logprobs": 2}
        stream = await one.post(PATH, **body, stream=True)
        found = events_of(stream.text)
        final = found[-1]["response"]
        assert final["top_logprobs"] == 2
        url = f"{PATH}/{final['id']}"
        assert (await two.client.get(url)).json() == final
        blocks = [block + "\n\n" for block in stream.text.split("\n\n")[:-1]]
        for number in range(0, len(blocks), 5):
            rest = (await two.client.get(f"{url}?stream=true&starting_after={number}")).text
            assert rest == "".join(blocks[number + 1 :])
    for place, item in enumerate(final["output"]):
        if item["type"] != "message":
            assert "logprobs" not in orjson.dumps(item).decode()
            continue
        part = item["content"][0]
        assert text_of(part["logprobs"]).strip() == part["text"].strip()
        mine = [event for event in found if event.get("output_index") == place]
        deltas = [event for event in mine if event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
        [done] = [event for event in mine if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == part["logprobs"]
        [added] = [event for event in mine if event["type"] == "response.content_part.added"]
        assert added["part"]["logprobs"] == []
        for entry in part["logprobs"]:
            assert set(entry) == {"token", "bytes", "logprob", "top_logprobs"}
            assert [set(one) for one in entry["top_logprobs"]] == [{"token", "bytes", "logprob"}] * 2


async def test_they_come_when_they_are_asked_for() -> None:
    asked: list[Request] = []
    async with tool_rig(template(None), "It rains.", asked=asked) as one:
        create = functools.partial(client_of(one).responses.create, model="tiny", input="hi")
        plain = await create(include=["reasoning.encrypted_content", "file_search_call.results"], top_logprobs=0)
        included = await create(include=["message.output_text.logprobs"])
        alternatives = await create(top_logprobs=20)
        for bad in (21, -1, "x"):
            status, error = error_of(await one.post(PATH, input="hi", top_logprobs=bad))
            assert (status, error["param"]) == (400, "top_logprobs")
    logprobs = [answer.output[0].content[0].logprobs for answer in (plain, included, alternatives)]  # type: ignore[union-attr]
    assert logprobs[0] == []
    assert [len(found) for found in logprobs[1:]] == [len(tokenizer(template(None)).encode("It rains."))] * 2
    assert [len(found[0].top_logprobs) for found in logprobs[1:]] == [0, 20]
    assert [request.sampling.logprobs for request in asked] == [None, 0, 20]
    assert plain.top_logprobs == included.top_logprobs == 0


async def test_a_message_that_is_continued_leaves_them_behind() -> None:
    async with tool_rig(template(None), "It rains.") as one:
        first = await one.post(PATH, input="hi", include=INCLUDE)
        second = await one.post(PATH, input="hi", previous_response_id=first.json()["id"])
        items = await one.client.get(f"{PATH}/{second.json()['id']}/input_items")
    assert "logprob" not in items.text


TEXTS = st.lists(
    st.sampled_from(
        [*PLAIN, *(text for texts in MALFORMED.values() for text in texts), "<think>", "</think>", "\n", " "]
        + [answer.text for answers in ANSWERS.values() for answer in answers]
    ),
    max_size=4,
).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@given(text=TEXTS, every=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_the_place_of_content_is_where_its_text_stands(name: str, text: str, every: int) -> None:
    """A stop string may hold text back: several tokens' text comes with the last of them."""
    source = template(name, thinks=True)
    own = tokenizer(source)
    markers = Markers(stored_formats(name, "think"), own)
    parser, shown, at, held = AnswerParser(markers), "", 0, ""
    for number, token_id in enumerate(own.encode(text), 1):
        piece = "" if own.is_special(token_id) else own.token_bytes(token_id).decode("latin-1")
        shown += markers.by_token.get(token_id, "") + piece
        if number % every:
            delta, held = parser.push(token_id, "", len(held)), held + piece
        else:
            delta, held = parser.push(token_id, held + piece, 0), ""
        at = check_place(delta, shown, at, markers)
    check_place(parser.flush(held, is_cut=False), shown, at, markers)


def check_place(delta: Any, shown: str, at: int, markers: Markers) -> int:
    """Check that the content of a delta is the text at its place, after the content before it.

    Between pieces of content in one delta there may be a call or reasoning.
    """
    if not delta.content:
        return at
    assert at <= delta.start < delta.end <= len(shown)
    place, gaps = markers.visible(shown[delta.start : delta.end]), len(delta.calls) + bool(delta.reasoning)
    if place != delta.content:
        before = alike(place, delta.content)
        after = alike(place[::-1], delta.content[::-1])
        assert gaps
        assert before
        assert after
        assert gaps > 1 or before + after >= len(delta.content)
    return int(delta.end)


def alike(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
