"""Bodies of megabytes: parsed beside the event loop, with the same verdicts as small ones."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from gateway_rig import error_of, rig, until
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator
from starlette.requests import Request

from orca.gateway.errors import ApiError
from orca.gateway.receive import Intake, receive_body
from orca.gateway.settings import Settings

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
    with Intake(1 << 30).call() as held:
        return await receive_body(Request(scope, receive), Noting, Settings(model="tiny", **settings), held)


@pytest.mark.parametrize(("size", "is_inline"), [(1_000, True), (4_000_000, False)])
async def test_large_bodies_are_parsed_in_a_thread(size: int, is_inline: bool) -> None:
    THREADS.clear()
    await received(b'{"prompt": "' + b"a" * size + b'"}')
    assert (threading.current_thread() in THREADS) == is_inline


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
async def test_a_name_that_is_there_twice_is_found_wherever_it_is(pairs: Any) -> None:
    refusals = []
    try:
        await received(written(pairs).encode())
    except ApiError as error:
        refusals.append(error.message)
    assert [message.partition(": is ")[2] for message in refusals] == ["there twice in one object"] * has_twice(pairs)


async def test_bodies_beyond_what_there_is_for_all_of_them_are_refused_until_others_leave() -> None:
    async def half_a_body() -> AsyncIterator[bytes]:
        yield b"{" + b" " * 599
        await may_end.wait()
        yield b"}"

    may_end = asyncio.Event()
    settings = Settings(model="tiny", body_bytes_max=1_000, bodies_bytes_max=1_000)
    headers = {"content-type": "application/json"}
    async with rig(schedules=False, settings=settings) as one:
        intake = one.app.state.gateway.intake
        slow = asyncio.create_task(one.client.post("/v1/completions", content=half_a_body(), headers=headers))
        await until(lambda: intake.held_bytes == 600)
        refused = await one.client.post("/tokenize", content=b" " * 500, headers=headers)
        assert (error_of(refused)[0], refused.headers["retry-after"]) == (503, "1")
        may_end.set()
        assert (await slow).status_code == 400
        assert intake.held_bytes == 0
