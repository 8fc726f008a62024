"""Bodies of megabytes: parsed beside the event loop, with the same verdicts as small ones."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator
from starlette.requests import Request

from orca.gateway.errors import ApiError
from orca.gateway.http.receive import BodyBudget, UnreadBody, receive_body
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import error_of, rig, until

THREADS: list[threading.Thread] = []


class Noting(BaseModel):
    """A body that notes who parses it."""

    @model_validator(mode="before")
    @classmethod
    def _note(cls, value: Any) -> Any:
        THREADS.append(threading.current_thread())
        return value


async def received(content: bytes, **settings: Any) -> Noting:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with BodyBudget(1 << 30).for_call() as budget:
        unread = UnreadBody.of(Request(scope, receive))
        return await receive_body(unread, Noting, GatewaySettings(model="tiny", **settings), budget)


@pytest.mark.parametrize(("size", "is_inline"), [(1_000, True), (4_000_000, False)])
async def test_large_bodies_are_parsed_in_a_thread(size: int, is_inline: bool) -> None:
    THREADS.clear()
    await received(b'{"prompt": "' + b"a" * size + b'"}')
    assert (threading.current_thread() in THREADS) == is_inline


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages": [' + b",".join([b'{"role": "user", "content": ""}'] * 130_000) + b"]}",
        b'{"prompt": [' + b",".join([b"[]"] * 1_300_000) + b"]}",
        b'{"a": ' + b'{"b": [' * 9 + b",".join([b"{}"] * 9_990) + b"]}" * 9 + b"}",
    ],
    ids=["messages", "lists", "deeply nested"],
)
async def test_a_body_of_too_many_objects_and_lists_is_refused_before_it_is_checked(content: bytes) -> None:
    THREADS.clear()
    with pytest.raises(ApiError, match="more than 10000 objects and lists"):
        await received(content)
    assert THREADS == []


async def test_as_many_objects_and_lists_as_a_body_may_have_are_checked() -> None:
    THREADS.clear()
    await received(b'{"a": [' + b",".join([b"{}"] * 9_998) + b"]}")
    assert len(THREADS) == 1


@pytest.mark.parametrize(
    "limit", [{"inline_messages_max": 2}, {"inline_chat_characters_max": 14}], ids=["messages", "characters"]
)
async def test_a_chat_of_many_messages_or_long_texts_is_rendered_in_a_thread(limit: dict[str, int]) -> None:
    settings = replace(GatewaySettings(model="tiny"), **limit)
    async with rig(schedules=False, settings=settings) as one:
        template = one.app.state.gateway.models.current.chat_template
        render, threads = template.render, []

        def noting(*words: Any, **named: Any) -> str:
            threads.append(threading.current_thread())
            return render(*words, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(template), "render", lambda _, *words, **named: noting(*words, **named))
            for count in (2, 3):
                messages = [{"role": "user", "content": "the fox"}] * count
                answer = await one.client.post("/tokenize", json={"messages": messages})
                assert answer.status_code == 200, answer.text
        assert [thread is threading.current_thread() for thread in threads] == [True, False]


async def test_more_tokens_than_a_context_can_hold_are_not_detokenized() -> None:
    settings = GatewaySettings(model="tiny", detokenize_tokens_max=10)
    async with rig(schedules=False, settings=settings) as one:
        most = max(10, one.app.state.gateway.models.current.info.max_model_len)
        for count, status in ((most, 200), (most + 1, 400)):
            answer = await one.client.post("/detokenize", json={"tokens": [5] * count})
            assert answer.status_code == status, answer.text
        assert error_of(answer)[1]["param"] == "tokens"


async def test_a_prompt_of_a_million_token_ids_is_refused_by_their_number() -> None:
    async with rig(schedules=False) as one:
        content = orjson.dumps({"prompt": [1] * 1_000_000})
        headers = {"content-type": "application/json"}
        status, error = error_of(await one.client.post("/v1/completions", content=content, headers=headers))
        assert (status, error["code"]) == (400, "context_length_exceeded")


NAMES = st.text(st.sampled_from('a"\\:{ü'), max_size=3)
VALUES = st.recursive(
    NAMES | st.integers(0, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(NAMES, inner), max_size=3).map(tuple),
    max_leaves=8,
)


def written(value: Any) -> str:
    """JSON in which objects, drawn as pairs, may have a name twice."""
    if isinstance(value, tuple):
        return "{ " + " , ".join(f"{json.dumps(name)} : {written(one)}" for name, one in value) + " }"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def has_twice(value: Any) -> bool:
    if isinstance(value, tuple):
        names = [name for name, _ in value]
        return len(set(names)) < len(names) or any(has_twice(one) for _, one in value)
    return isinstance(value, list) and any(map(has_twice, value))


@given(pairs=st.lists(st.tuples(NAMES, VALUES), max_size=4).map(tuple))
async def test_a_duplicate_field_name_is_found_at_any_depth(pairs: Any) -> None:
    refusals = []
    try:
        await received(written(pairs).encode())
    except ApiError as error:
        refusals.append(error.message)
    assert [message.partition(": occurs ")[2] for message in refusals] == ["twice in one object"] * has_twice(pairs)


async def test_bodies_beyond_the_memory_for_all_bodies_are_refused_until_others_end() -> None:
    async def half_a_body() -> AsyncIterator[bytes]:
        yield b"{" + b" " * 599
        await may_end.wait()
        yield b"}"

    may_end = asyncio.Event()
    settings = GatewaySettings(model="tiny", body_bytes_max=1_000, bodies_bytes_max=1_000)
    headers = {"content-type": "application/json"}
    async with rig(schedules=False, settings=settings) as one:
        budget = one.app.state.gateway.body_budget
        slow = asyncio.create_task(one.client.post("/v1/completions", content=half_a_body(), headers=headers))
        await until(lambda: budget.held_bytes == 600)
        refused = await one.client.post("/tokenize", content=b" " * 500, headers=headers)
        assert (error_of(refused)[0], refused.headers["retry-after"]) == (503, "1")
        may_end.set()
        assert (await slow).status_code == 400
        assert budget.held_bytes == 0
