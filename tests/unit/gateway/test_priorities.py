"""The priority of a call: its weight in the pool, its bound for an API key, and each refusal."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from orca.core.api_keys import ApiKey, KeyLimits, key_digest, key_line
from orca.core.domain.request import Request
from orca.gateway.routes.answer_schemas import RequestDocument
from orca.gateway.settings import GatewaySettings
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import Rig, WallClock, error_of, recording, rig

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PATHS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHATS: {"messages": [{"role": "user", "content": "hello"}]},
    RESPONSES: {"input": "hello"},
}


async def call(
    one: Rig, path: str = COMPLETIONS, *, key: str | None = None, keyed: str | None = None, **fields: Any
) -> httpx.Response:
    """Make a call. Args: key: the API key; keyed: the Idempotency-Key."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    headers |= {} if keyed is None else {"idempotency-key": keyed}
    return await one.client.post(path, json=PATHS[path] | fields, headers=headers)


def write_key(folder: Path, bound: int | None) -> GatewaySettings:
    """Write a file with one API key, which is "k". Returns: the settings of a gateway that reads it."""
    file = folder / "keys"
    file.write_text(key_line(ApiKey("k", key_digest("k"), KeyLimits(most_urgent_priority=bound))) + "\n")
    return GatewaySettings(model="tiny", api_keys_file=str(file))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("priority", "weight"), [(-8, 256.0), (-1, 2.0), (3, 0.125), (3.0, 0.125), (8, 2.0**-8)])
async def test_a_priority_is_stored_as_a_weight(
    one: Rig, accepted: list[Request], path: str, priority: float, weight: float
) -> None:
    response = await call(one, path, priority=priority)
    assert response.status_code == 200, response.text
    assert [request.weight for request in accepted] == [weight]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{}, {"priority": None}, {"priority": 0}, {"priority": -0.0}], ids=str)
async def test_the_default_priority_stores_nothing(
    one: Rig, accepted: list[Request], path: str, fields: dict[str, Any]
) -> None:
    assert (await call(one, path, **fields)).status_code == 200
    assert [request.weight for request in accepted] == [None]


async def test_all_requests_of_a_call_have_its_weight(one: Rig, accepted: list[Request]) -> None:
    assert (await call(one, prompt=["hello", "the"], n=2, priority=-2)).status_code == 200
    assert [request.weight for request in accepted] == [4.0] * 4


BAD: list[tuple[Any, str]] = [
    (-9, "priority: must be at least -8, not -9"),
    (9, "priority: must be at most 8, not 9"),
    (10**30, "priority: is too large a number"),
    (True, "priority: must be a whole number, not true"),
    (1.5, "priority: must be a whole number, not 1.5"),
    ("1", "priority: must be a whole number, not '1'"),
    ([1], "priority: must be a whole number, not a list"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("priority", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
async def test_what_is_no_priority_is_refused(path: str, priority: Any, sentence: str) -> None:
    async with rig(schedules=False) as one:
        status, error = error_of(await call(one, path, priority=priority))
        assert (status, error["param"], error["message"]) == (400, "priority", sentence)
        assert not one.pool.state.parents


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("bound", "priority", "is_refused"),
    [
        (None, -1, True),
        (None, 0, False),
        (None, 8, False),
        (-4, -5, True),
        (-4, -4, False),
        (-8, -8, False),
        (5, 0, True),
        (5, 4, True),
        (5, 5, False),
    ],
)
async def test_a_call_is_at_most_as_urgent_as_its_key_allows(
    tmp_path: Path, path: str, bound: int | None, priority: int, is_refused: bool
) -> None:
    async with rig(settings=write_key(tmp_path, bound)) as one:
        response = await call(one, path, key="k", priority=priority)
        if not is_refused:
            assert response.status_code == 200, response.text
            return
        status, error = error_of(response)
        assert (status, error["param"], error["code"]) == (400, "priority", "priority_not_allowed")
        assert error["message"] == (
            f"priority: {priority} is more urgent than this API key allows; its most urgent priority is {bound or 0}"
        )
        assert not one.pool.state.parents


async def test_a_key_of_the_setting_may_not_be_more_urgent_than_the_default() -> None:
    async with rig(settings=GatewaySettings(model="tiny", api_keys=("k",))) as one:
        assert error_of(await call(one, key="k", priority=-1))[1]["code"] == "priority_not_allowed"
        assert (await call(one, key="k", priority=1)).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("bound", "weight"), [(None, None), (-4, None), (0, None), (3, 0.125)])
async def test_a_call_that_names_no_priority_gets_the_bound_of_a_less_urgent_key(
    tmp_path: Path, path: str, bound: int | None, weight: float | None
) -> None:
    found: list[Request] = []
    async with rig(settings=write_key(tmp_path, bound)) as one:
        one.scheduler.answer = recording(found)
        assert (await call(one, path, key="k")).status_code == 200
    assert [request.weight for request in found] == [weight]


@pytest.mark.parametrize("path", PATHS)
async def test_a_priority_waits_for_the_schema_that_has_weights(path: str) -> None:
    pool = MemoryPool(WallClock())
    names = "priority, input" if path == RESPONSES else "priority"
    async with rig(pool=pool) as one:
        await pool.set_schema(2)
        response = await call(one, path, priority=-1)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "priority")
        assert error["message"].startswith(f"{names}: not available while schema 2 ")
        assert not pool.state.parents
        await pool.set_schema(3)
        assert (await call(one, path, priority=-1)).status_code == 200


async def test_the_default_priority_needs_no_newer_schema() -> None:
    pool = MemoryPool(WallClock())
    async with rig(pool=pool) as one:
        await pool.set_schema(2)
        assert (await call(one, priority=0)).status_code == 200


@pytest.mark.parametrize("known", [2, 3])
async def test_the_bound_of_a_key_refuses_no_call_that_names_no_priority_before_the_schema(
    tmp_path: Path, known: int
) -> None:
    """The gateway may learn late that an older schema is in force again."""
    found: list[Request] = []
    pool = MemoryPool(WallClock())
    async with rig(pool=pool, settings=write_key(tmp_path, 3)) as one:
        one.scheduler.answer = recording(found)
        await pool.set_schema(2)
        one.app.state.gateway.models.schema = known
        response = await call(one, key="k")
        assert response.status_code == 200, response.text
    assert [request.weight for request in found] == [None]


async def test_a_repeated_call_is_the_same_one_only_with_the_same_priority() -> None:
    async with rig() as one:
        first = await call(one, keyed="i", priority=-2)
        assert first.status_code == 200
        assert (await call(one, keyed="i", priority=-2)).content == first.content
        for other in ({}, {"priority": 0}, {"priority": -3}):
            status, error = error_of(await call(one, keyed="i", **other))
            assert (status, error["code"]) == (422, "idempotency_key_reused")


async def test_a_call_that_names_no_priority_is_the_same_one_with_null() -> None:
    async with rig() as one:
        first = await call(one, keyed="i")
        assert (await call(one, keyed="i", priority=None)).content == first.content


async def test_an_accepted_call_may_be_repeated_under_a_stricter_bound(tmp_path: Path) -> None:
    async with rig(settings=write_key(tmp_path, -4)) as one:
        first = await call(one, key="k", keyed="i", priority=-4)
        assert first.status_code == 200
        write_key(tmp_path, None)
        await one.app.state.gateway.keys.reload()
        assert (await call(one, key="k", keyed="i", priority=-4)).content == first.content
        assert error_of(await call(one, key="k", keyed="new", priority=-4))[1]["code"] == "priority_not_allowed"


async def test_a_refused_call_may_be_sent_again_with_an_allowed_priority(tmp_path: Path) -> None:
    async with rig(settings=write_key(tmp_path, None)) as one:
        assert (await call(one, key="k", keyed="i", priority=-4)).status_code == 400
        assert (await call(one, key="k", keyed="i", priority=0)).status_code == 200


@pytest.mark.parametrize(("priority", "shown"), [(-8, -8), (-3, -3), (8, 8), (0, None), (None, None)])
async def test_the_state_of_a_request_shows_a_priority_other_than_the_default(
    one: Rig, priority: int | None, shown: int | None
) -> None:
    accepted = (await call(one, priority=priority, n=2, background=True)).json()
    read = (await one.client.get(f"/v1/requests/{accepted['id']}")).json()
    for document in (accepted, read):
        assert RequestDocument.model_validate(document).priority == shown
        assert ("priority" in document) == (shown is not None)


async def test_the_state_shows_the_priority_that_a_key_gave(tmp_path: Path) -> None:
    async with rig(settings=write_key(tmp_path, 3)) as one:
        assert (await call(one, key="k", background=True)).json()["priority"] == 3
