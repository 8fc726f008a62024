"""Conversations of the Responses API: input items that are stored and listed, and responses that go on from others."""

import asyncio
from functools import partial
from typing import Any

import openai
import orjson
import pytest

from orca.core.domain.request import FinishReason, Request
from orca.gateway.responses.conversation import page_of
from orca.gateway.settings import GatewaySettings
from orca.pool import codec
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import Rig, WallClock, error_of, until
from support.gateway.tool_rig import ANSWERS, template, tokenizer, tool_rig

PATH = "/v1/responses"
SOURCE = template("hermes", thinks=True) + "{# reasoning_content #}"
CALLING = f"<think>\nhm\n</think>\n\n{ANSWERS['hermes'][1].text}"
TOOLS = [{"type": "function", "name": name} for name in ("get_weather", "now")]


def client_of(one: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://orca/v1", api_key="none", http_client=one.client)


async def created(one: Rig, **body: Any) -> dict[str, Any]:
    response = await one.post(PATH, **{"input": "hi", "max_output_tokens": 200, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def listed(one: Rig, response_id: str, query: str = "order=asc&limit=100") -> dict[str, Any]:
    found: dict[str, Any] = (await one.client.get(f"{PATH}/{response_id}/input_items?{query}")).json()
    return found


def text_of(request: Request) -> str:
    return tokenizer(SOURCE).decode(request.prompt, skip_special_tokens=False)


async def test_the_input_items_of_a_response_are_listed() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a", "junk": "x" * 900}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "Wait.", "id": "rs_1"},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}", "junk": "x" * 900},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]
    async with tool_rig(SOURCE, "ok") as one:
        answer = await created(one, input=items, instructions="No item of the list.")
        found = await listed(one, answer["id"])
        assert [item["type"] for item in found["data"]] == [
            *["message"] * 2, "reasoning", "message", "function_call", "function_call_output",
        ]  # fmt: skip
        ids = [item["id"] for item in found["data"]]
        assert len(set(ids)) == 6
        assert ids[2] == "rs_1"
        assert (found["object"], found["first_id"], found["last_id"], found["has_more"]) == (
            "list", ids[0], ids[-1], False,
        )  # fmt: skip
        assert found["data"][0]["content"] == [{"type": "input_text", "text": "Be brief."}]
        assert "junk" not in orjson.dumps(found).decode()
        assert "input_items" not in answer
        pages = client_of(one).responses.input_items
        assert [item.id async for item in pages.list(answer["id"], limit=2, order="asc")] == ids
        assert [item.id async for item in pages.list(answer["id"], limit=4)] == ids[::-1]
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("limit=101", "limit"), ("order=up", "order")):
            status, error = error_of(await one.client.get(f"{PATH}/{answer['id']}/input_items?{query}"))
            assert (status, error["param"]) == (400, param)
        status, error = error_of(await one.client.get(f"{PATH}/{answer['id']}/input_items?after=x"))
        assert (status, error["param"]) == (400, "after")
        hidden = await created(one, store=False)
        status, error = error_of(await one.client.get(f"{PATH}/{hidden['id']}/input_items"))
        assert (status, error["code"]) == (404, "not_found")


def test_a_list_without_items_has_an_empty_page() -> None:
    empty = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert page_of([], {}) == empty


async def test_a_response_continues_an_earlier_one_with_all_of_its_items() -> None:
    asked: list[Request] = []
    pool = MemoryPool(WallClock())
    async with (
        tool_rig(SOURCE, CALLING, asked=asked, pool=pool) as one,
        tool_rig(SOURCE, pool=pool, schedules=False) as two,
    ):
        first = await client_of(one).responses.create(
            model="tiny",
            input="What is the weather?",
            instructions="Old.",
            tools=TOOLS,
            max_output_tokens=200,  # type: ignore[arg-type]
        )
        calls = [item for item in first.output if item.type == "function_call"]
        outputs: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"{call.name}: rain"} for call in calls
        ]
        # Another gateway takes the call, and none has anything but the pool's record.
        second = await client_of(two).responses.create(
            model="tiny",
            input=outputs,
            previous_response_id=first.id,
            instructions="New.",
            tools=TOOLS,
            max_output_tokens=200,  # type: ignore[arg-type]
        )
        assert second.previous_response_id == first.id
        assert (await client_of(one).responses.retrieve(second.id)).previous_response_id == first.id
        given = [{"role": "user", "content": "What is the weather?"}, *[item.to_dict() for item in first.output]]
        await created(one, input=[*given, *outputs], instructions="New.", tools=TOOLS)
        assert text_of(asked[1]) == text_of(asked[2])
        assert "Old." not in text_of(asked[1])
        # A third one goes on from the second alone.
        await client_of(two).responses.delete(first.id)
        async with client_of(two).responses.stream(
            model="tiny",
            input="And now?",
            previous_response_id=second.id,
            tools=TOOLS,
            max_output_tokens=200,  # type: ignore[arg-type]
        ) as stream:
            third = await stream.get_final_response()
        assert third.previous_response_id == second.id
        found = (await listed(two, third.id))["data"]
        kinds = ["message", "reasoning", "message", "function_call", "function_call"]
        outputs_kinds = ["function_call_output"] * 2
        assert [item["type"] for item in found] == [*kinds, *outputs_kinds, *kinds[1:], "message"]
        whole = [item.id for item in (*first.output, *second.output)]
        assert [item["id"] for item in found if item["id"] in whole] == whole
        assert len({item["id"] for item in found}) == len(found)
        await created(one, input=found, tools=TOOLS)
        assert text_of(asked[3]) == text_of(asked[4])


async def test_a_response_that_is_gone_hidden_or_strange_is_not_found() -> None:
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("a", "b"))
    async with tool_rig(SOURCE, "ok", settings=GatewaySettings(model="tiny", api_keys=("a", "b"))) as one:
        one.client.headers.update(mine)
        stored, hidden = await created(one), await created(one, store=False)
        chat = await one.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=5)
        gone = await created(one)
        await one.client.delete(f"{PATH}/{gone['id']}")
        for name in (hidden["id"], chat.json()["id"], gone["id"], "resp_none", ""):
            status, error = error_of(await one.post(PATH, input="hi", previous_response_id=name))
            assert status == 404
            assert error == {
                "message": f"Previous response with id '{name}' not found.",
                "type": "invalid_request_error",
                "param": "previous_response_id",
                "code": "previous_response_not_found",
            }
        body = {"input": "hi", "previous_response_id": stored["id"]}
        assert (await one.client.post(PATH, json=body, headers=yours)).status_code == 404
        assert (await one.client.post(PATH, json=body, headers=mine)).status_code == 200


async def test_a_response_that_runs_cannot_be_continued() -> None:
    async with tool_rig(SOURCE, "It rains.") as one:
        one.scheduler.turns_left = 2
        running = (await one.post(PATH, input="hi", background=True)).json()
        await until(lambda: any(len(record.log) == 2 for record in one.pool.state.records.values()))
        status, error = error_of(await one.post(PATH, input="hi", previous_response_id=running["id"]))
        assert (status, error["param"]) == (400, "previous_response_id")
        assert "has not ended" in error["message"]
        one.scheduler.turns_left = None
        one.scheduler.may_run.set()


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        ("It rains all day long.", ["message"]),
        ("<think>\nIt rains all day", []),
        (ANSWERS["hermes"][0].text, []),
        (f"Wait.\n\n{ANSWERS['hermes'][0].text}", ["message"]),
    ],
)
async def test_what_is_whole_of_a_cut_response_is_continued(answer: str, kinds: list[str]) -> None:
    tokens = len(tokenizer(SOURCE).encode(answer))
    async with tool_rig(SOURCE, answer) as one:
        cut = await created(one, max_output_tokens=tokens - 5, tools=TOOLS)
        assert cut["status"] == "incomplete"
        assert cut["output"]
        again = await created(one, previous_response_id=cut["id"], max_output_tokens=1)
        found = (await listed(one, again["id"]))["data"]
    assert [item["type"] for item in found] == ["message", *kinds, "message"]
    if kinds:
        assert found[1]["content"][0]["text"] == cut["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.DEADLINE_EXCEEDED])
async def test_a_response_that_failed_is_continued_from_what_it_has(reason: FinishReason) -> None:
    asked: list[Request] = []
    async with tool_rig(SOURCE, "It rains.", asked=asked) as one:
        one.scheduler.reason = reason
        failed = (await one.post(PATH, input="hi", background=True)).json()
        await until(lambda: one.pool.state.parents[failed["id"]].left == 0)
        one.scheduler.reason = None
        await created(one, input="And?", previous_response_id=failed["id"])
    assert "<|user|>hi<|assistant|>It rains." in text_of(asked[1])
    assert text_of(asked[1]).endswith("<|user|>And?<|assistant|>")


async def test_stored_items_are_counted_and_no_part_of_what_renders_the_response() -> None:
    text = "weather " * 20
    async with tool_rig(SOURCE, "ok") as one:
        stored, hidden = [await created(one, input=text, store=store, seed=1) for store in (True, False)]
        parents, records = one.pool.state.parents, one.pool.state.records
        kept = [parents[answer["id"]].submission for answer in (stored, hidden)]
        assert kept[1].conversation is None
        assert text in (kept[0].conversation or "")
        assert text not in kept[0].render
        reserved = [records[f"{answer['id']}.0"].bytes for answer in (stored, hidden)]
        bytes_of = [codec.parent_bytes(each.render, each.conversation) for each in kept]
        assert reserved[0] - reserved[1] == bytes_of[0] - bytes_of[1] > len(text)


@pytest.mark.parametrize("is_long", [False, True])
async def test_long_conversations_are_read_and_written_in_a_thread(
    is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()
    to_thread = asyncio.to_thread

    async def counted(work: Any, *arguments: Any) -> Any:
        threads.append(work.func.__name__ if isinstance(work, partial) else work.__name__)
        return await to_thread(work, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    settings = GatewaySettings(model="tiny", inline_body_bytes_max=1000)
    async with tool_rig(SOURCE, "ok", settings=settings) as one:
        first = await created(one, input="hello " * (300 if is_long else 10))
        second = await created(one, input="And?", previous_response_id=first["id"])
        await listed(one, second["id"])
        threads = [name for name in threads if name in ("translate", "_continued", "_page")]
        assert threads == (["translate", "_continued", "translate", "_page"] if is_long else [])
        threads.clear()
        await one.client.get(f"{PATH}/{second['id']}")
        assert not threads
        assert one.app.state.gateway.body_budget.held_bytes == 0


async def test_a_repeated_call_needs_its_earlier_response_no_more() -> None:
    async with tool_rig(SOURCE, "ok") as one:
        first = await created(one)
        body = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 50}
        headers = {"idempotency-key": "k"}
        second = await one.client.post(PATH, json=body, headers=headers)
        await one.client.delete(f"{PATH}/{first['id']}")
        again = await one.client.post(PATH, json=body, headers=headers)
        assert (again.status_code, again.content) == (200, second.content)
        other = await one.client.post(PATH, json={**body, "input": "Or?"}, headers=headers)
        assert other.status_code == 422
        other = await one.client.post(PATH, json=body, headers={"idempotency-key": "new"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "previous_response_not_found")
        unkeyed = await one.client.post(PATH, json=body)
        assert unkeyed.status_code == 404


async def test_a_conversation_has_bounds() -> None:
    settings = GatewaySettings(model="tiny", body_bytes_max=2000, containers_max=24, inline_body_bytes_max=300)
    async with tool_rig(SOURCE, "ok", settings=settings) as one:
        name = (await created(one, input="hello " * 310))["id"]
        status, error = error_of(await one.post(PATH, input="hi", previous_response_id=name))
        assert (status, error["param"]) == (400, "previous_response_id")
        assert "more than 2000; begin a new one" in error["message"]
        name = (await created(one, input="hello " * 100))["id"]
        status, error = error_of(await one.post(PATH, input="hello " * 280, previous_response_id=name))
        assert (status, error["param"]) == (400, "previous_response_id")
        name = (await created(one))["id"]
        for _ in range(20):
            response = await one.post(PATH, input="hi", previous_response_id=name)
            if response.status_code != 200:
                break
            name = response.json()["id"]
        status, error = error_of(response)
        assert (status, error["param"]) == (400, "previous_response_id")
        assert "conversation has more than 24 objects and lists" in error["message"]
        assert one.app.state.gateway.body_budget.held_bytes == 0


async def test_a_repeated_call_never_runs_without_its_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    async with tool_rig(SOURCE, "ok", asked=asked) as one:
        first = await created(one)
        body = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 50}
        headers = {"idempotency-key": "k"}
        second = (await one.client.post(PATH, json=body, headers=headers)).json()
        await one.client.delete(f"{PATH}/{first['id']}")
        parent = one.pool.parent

        async def forgotten(name: str) -> Any:
            # The stored call goes between the look for it and the submit.
            found = await parent(name)
            if name == second["id"]:
                await one.pool.forget(name)
            return found

        monkeypatch.setattr(one.pool, "parent", forgotten)
        again = await one.client.post(PATH, json=body, headers=headers)
        assert again.status_code in (404, 409, 503), again.text
        assert len(asked) == 2
