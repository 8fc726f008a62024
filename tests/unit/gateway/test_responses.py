"""The Responses API: items in and out, streams that are numbered and go on at any gateway, and clear errors."""

import asyncio
import functools
from typing import Any

import httpx
import openai
import orjson
import pytest

from orca.core.domain.request import FinishReason, Request
from orca.gateway.settings import GatewaySettings
from orca.pool.contract import FORGOTTEN_FOR_MS
from orca.pool.memory.pool import MemoryPool
from orca.pool.records import OnDisconnect, Parent
from support.gateway.gateway_rig import Rig, WallClock, error_of, until
from support.gateway.tool_rig import ANSWERS, FORMATS, template, tokenizer, tool_rig

PATH = "/v1/responses"
THOUGHT = "Let me see."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWERS['hermes'][1].text}"
SOURCE = template("hermes", thinks=True)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}
NOW: dict[str, Any] = {"type": "function", "name": "now"}


def client_of(one: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://orca/v1", api_key="none", http_client=one.client)


def events_of(stream: str) -> list[dict[str, Any]]:
    found = []
    for block in stream.split("\n\n")[:-1]:
        kind, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        found.append(event)
    return found


async def created(one: Rig, **body: Any) -> dict[str, Any]:
    response = await one.post(PATH, **{"input": "hi", "max_output_tokens": 900, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_a_response_has_the_items_of_the_answer() -> None:
    async with tool_rig(SOURCE, TEXT) as one:
        answer = await created(one, tools=[WEATHER, NOW], metadata={"a": "b"}, instructions="Be brief.")
        again = (await one.client.get(f"{PATH}/{answer['id']}")).json()
    assert again == answer
    reasoning, message, weather, now = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert message["content"][0]["text"] == "Wait."
    assert (weather["name"], weather["arguments"]) == ANSWERS["hermes"][1].calls[0]
    assert (now["name"], now["arguments"]) == ANSWERS["hermes"][1].calls[1]
    assert len({item["id"] for item in answer["output"]}) == 4
    assert {item["status"] for item in answer["output"]} == {answer["status"]} == {"completed"}
    assert answer["id"].startswith("resp_")
    assert answer["metadata"] == {"a": "b"}
    assert answer["instructions"] == "Be brief."
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("name", FORMATS)
async def test_the_official_client_reads_the_stream(name: str) -> None:
    for answer in ANSWERS[name]:
        async with tool_rig(template(name, thinks=True), f"<think>{THOUGHT}</think>{answer.text}") as one:
            create = client_of(one).responses.stream
            async with create(model="tiny", input="hi", tools=[WEATHER, NOW], max_output_tokens=900) as stream:  # type: ignore[list-item]
                numbers = [event.sequence_number async for event in stream]
                final = await stream.get_final_response()
            calls = [(item.name, item.arguments) for item in final.output if item.type == "function_call"]
            assert calls == list(answer.calls)
            assert (final.output_text or None) == answer.content
            assert numbers == list(range(len(numbers)))
            retrieved = await client_of(one).responses.retrieve(final.id)
            assert [(item.type, item.id) for item in retrieved.output] == [
                (item.type, item.id) for item in final.output
            ]
            assert retrieved.output_text == final.output_text


async def test_events_are_complete_and_agree_with_the_final_object() -> None:
    async with tool_rig(SOURCE, TEXT) as one:
        response = await one.post(PATH, input="hi", tools=[WEATHER, NOW], max_output_tokens=900, stream=True)
    found = events_of(response.text)
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == "response.completed"
    final = found[-1]["response"]
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == final["output"]
    for place, item in enumerate(final["output"]):
        deltas = [event for event in found if event["type"].endswith(".delta") and event["output_index"] == place]
        assert {event["item_id"] for event in deltas} == {item["id"]}
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in deltas) == text
    assert [event["sequence_number"] for event in found] == list(range(len(found)))


async def test_a_second_gateway_goes_on_after_every_event() -> None:
    pool = MemoryPool(WallClock())
    async with tool_rig(SOURCE, TEXT, pool=pool) as first, tool_rig(SOURCE, pool=pool, schedules=False) as second:
        body = {"input": "hi", "tools": [WEATHER, NOW], "max_output_tokens": 900, "stream": True}
        stream = await first.post(PATH, **body)
        found = events_of(stream.text)
        blocks = [block + "\n\n" for block in stream.text.split("\n\n")[:-1]]
        url = f"{PATH}/{found[0]['response']['id']}?stream=true"
        assert (await second.client.get(url)).text == stream.text
        for number in range(len(found)):
            rest = (await second.client.get(f"{url}&starting_after={number}")).text
            assert rest == "".join(blocks[number + 1 :])
        resumed = await client_of(second).responses.retrieve(found[0]["response"]["id"], stream=True, starting_after=5)
        assert [event.sequence_number async for event in resumed] == list(range(6, len(found)))


async def test_a_background_response_is_polled() -> None:
    async with tool_rig(SOURCE, "It rains.") as one:
        client = client_of(one)
        response = await client.responses.create(model="tiny", input="hi", background=True)
        assert response.status == "queued"

        async def is_done() -> bool:
            return (await client.responses.retrieve(response.id)).status == "completed"

        for _ in range(2000):
            if await is_done():
                break
        done = await client.responses.retrieve(response.id)
        assert (done.status, done.output_text) == ("completed", "It rains.")


async def test_a_background_response_streams_and_goes_on_without_its_reader() -> None:
    async with tool_rig(SOURCE, "It rains.") as one:
        stream = await client_of(one).responses.create(model="tiny", input="hi", background=True, stream=True)
        found = [event async for event in stream]
        assert found[-1].type == "response.completed"
        parent = one.pool.state.parents[found[0].response.id]
        assert parent.submission.on_disconnect is OnDisconnect.KEEP
        assert found[0].response.background is True


async def test_a_response_is_cancelled() -> None:
    async with tool_rig(SOURCE, "It rains.") as one:
        one.scheduler.turns_left = 2
        started = (await one.post(PATH, input="hi", background=True)).json()
        await until(lambda: any(len(record.log) == 2 for record in one.pool.state.records.values()))
        running = (await one.client.get(f"{PATH}/{started['id']}")).json()
        assert (running["status"], running["usage"]) == ("in_progress", None)
        cancelled = await client_of(one).responses.cancel(started["id"])
        assert cancelled.status == "cancelled"
        assert (await one.client.get(f"{PATH}/{started['id']}")).json()["status"] == "cancelled"
        one.scheduler.turns_left = None
        one.scheduler.may_run.set()


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with tool_rig(SOURCE, TEXT) as one:
        answer = await created(one, tools=[WEATHER, NOW], max_output_tokens=40)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]][-1] == "incomplete"


async def test_an_end_from_outside_is_a_failed_response() -> None:
    async with tool_rig(SOURCE, "It rains.") as one:
        one.scheduler.reason, one.scheduler.detail = FinishReason.REFUSED, "no"
        whole = await one.post(PATH, input="hi")
        stream = await one.post(PATH, input="hi", stream=True)
    status, error = error_of(whole)
    assert (status, error["code"]) == (400, "request_refused")
    last = events_of(stream.text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "request_refused", "message": error["message"]}


async def prompt_of(**body: Any) -> str:
    asked: list[Request] = []
    async with tool_rig(SOURCE, asked=asked) as one:
        await created(one, **body)
    return tokenizer(SOURCE).decode(asked[0].prompt, skip_special_tokens=False)


async def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Pa"}'}
    items = [
        {"role": "user", "content": "What is the weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rainy"}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    ]
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa"}}\n</tool_call>'
    prompt = await prompt_of(input=items, instructions="You know the weather.")
    assert prompt == (
        "<|system|>You know the weather.<|user|>What is the weather?"
        f"<|assistant|>Wait.{written}{written}<|tool|>sunny of c1<|tool|>rainy of c2<|system|>Be brief.<|assistant|>"
    )


async def test_tools_of_other_types_are_left_out() -> None:
    prompt = await prompt_of(tools=[{"type": "web_search"}, WEATHER, {"type": "custom", "name": "x"}])
    assert "get_weather" in prompt
    assert "web_search" not in prompt


async def test_a_form_constrains_the_text() -> None:
    asked: list[Request] = []
    async with tool_rig(template(None), '{"a": 1}', asked=asked) as one:
        form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {}}}}
        await created(one, text={"format": form})
        await created(one, text={"format": {"type": "text"}})
    assert asked[0].sampling.grammar is not None
    assert asked[1].sampling.grammar is None


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": 5}, "input", "must be text or a list of items, not 5"),
    ({"input": []}, "input", "must be text or a list of items, not an empty list"),
    ({"input": [5]}, "input[0]", "must be an item"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference' are not supported"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "must be user, assistant, system or developer"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "'input_image'"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "'input_file'"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]", "a type and a text"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name", "must be a text"),
    (
        {"input": [{"type": "function_call", "name": "f"}, {"type": "function_call", "name": ""}]},
        "input[1].name",
        "must be a text",
    ),
    ({"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}, "input[0].call_id", "must be a text"),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "must be text, not null"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}},
        "tool_choice.tools[0]",
        "names no function of tools (get_weather): 'g'",
    ),
    ({"conversation": "c"}, "conversation", "is not supported"),
    ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
    ({"previous_response_id": 5}, "previous_response_id", "must be text, not 5"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "not 'web_search'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice",
        "names no function of tools",
    ),
    ({"tools": [{"type": "x"}, {"type": "function", "name": "a b"}]}, "tools[1].name", "not 'a b'"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "must be 1 to 64"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be 'text'"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"uniqueItems": True}}}},
        "text.format.schema",
        "q",
    ),
    ({"background": True, "store": False}, "store", "must be stored"),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
    ({"max_output_tokens": 10**9}, "max_output_tokens", "maximum context length"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=str)
async def test_bad_input_is_refused_by_name(body: dict[str, Any], param: str, words: str) -> None:
    async with tool_rig(SOURCE) as one:
        status, error = error_of(await one.post(PATH, **{"input": "hi", **body}))
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


async def test_unknown_fields_are_ignored() -> None:
    async with tool_rig(SOURCE, "ok") as one:
        extra = {
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "x",
            "service_tier": "auto",
            "user": "u",
        }
        answer = await created(one, **extra, truncation="disabled", text={"verbosity": "low"}, client_metadata={"a": 1})
    assert answer["output"][0]["content"][0]["text"] == "ok"


CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "array", "items": {"type": "string"}},
                    "workdir": {"type": "string"},
                    "timeout_ms": {"type": "number"},
                },
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198",
    "text": {"verbosity": "medium"},
}
"""The fields that Codex sends."""


async def test_codex_makes_two_turns() -> None:
    call = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
    asked: list[Request] = []
    async with tool_rig(SOURCE, f"<think>\nhm\n</think>\n\n{call}", asked=asked) as one:
        first = events_of((await one.post(PATH, **CODEX)).text)[-1]
        assert first["type"] == "response.completed"
        reasoning, called = first["response"]["output"]
        assert (called["name"], called["arguments"]) == ("shell", '{"command": ["ls"]}')
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": '{"output": "a.py"}'}
        # Codex keeps what the server has encrypted, and leaves the reasoning out.
        items = [*CODEX["input"], {**reasoning, "content": None}, called, output]
        second = events_of((await one.post(PATH, **{**CODEX, "input": items})).text)[-1]
        assert second["type"] == "response.completed"
    prompt = tokenizer(SOURCE).decode(asked[1].prompt, skip_special_tokens=False)
    assert call in prompt
    assert f'<|tool|>{{"output": "a.py"}} of {called["call_id"]}' in prompt
    assert asked[0].sampling.grammar is not None


async def test_a_deleted_response_is_gone_at_every_gateway() -> None:
    pool = MemoryPool(WallClock())
    async with tool_rig(SOURCE, "It rains.", pool=pool) as one, tool_rig(SOURCE, pool=pool, schedules=False) as two:
        answer = await created(one)
        await client_of(two).responses.delete(answer["id"])
        again = await created(one)
        deleted = await two.client.delete(f"{PATH}/{again['id']}")
        assert (deleted.status_code, deleted.json()) == (
            200,
            {"id": again["id"], "object": "response", "deleted": True},
        )
        assert not pool.state.parents
        for rig in (one, two):
            url = f"{PATH}/{answer['id']}"
            await found_nothing(await rig.client.get(url))
            await found_nothing(await rig.client.get(f"{url}?stream=true"))
            await found_nothing(await rig.client.post(f"{url}/cancel"))
            await found_nothing(await rig.client.delete(url))
        pool.state.check()


async def test_a_deletion_ends_the_stream_that_another_gateway_writes() -> None:
    pool = MemoryPool(WallClock())
    async with tool_rig(SOURCE, "It rains.", pool=pool) as one, tool_rig(SOURCE, pool=pool, schedules=False) as two:
        one.scheduler.turns_left = 2
        posting = asyncio.create_task(one.post(PATH, input="hi", stream=True))
        waiting = asyncio.create_task(one.post(PATH, input="hi"))
        await until(lambda: [len(record.log) for record in pool.state.records.values()] == [2, 2])
        for name in list(pool.state.parents):
            assert (await two.client.delete(f"{PATH}/{name}")).status_code == 200
        events = events_of((await posting).text)
        assert (events[-1]["type"], events[-1]["code"]) == ("error", "unknown_request")
        status, error = error_of(await waiting)
        assert (status, error["code"]) == (404, "unknown_request")
        # The scheduler goes on with what it has, and commits in vain.
        one.scheduler.turns_left = None
        one.scheduler.may_run.set()
        await until(lambda: not one.scheduler.running)
        assert (await created(one))["status"] == "completed"
        pool.state.check()


async def test_only_its_owner_can_delete_a_response() -> None:
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("a", "b"))
    async with tool_rig(SOURCE, "ok", settings=GatewaySettings(model="tiny", api_keys=("a", "b"))) as one:
        made = await one.client.post(PATH, json={"input": "hi"}, headers=mine)
        url = f"{PATH}/{made.json()['id']}"
        await found_nothing(await one.client.delete(url, headers=yours))
        assert (await one.client.delete(url, headers=mine)).status_code == 200


async def test_the_key_of_a_deleted_response_makes_another_one_after_a_minute() -> None:
    asked: list[Request] = []
    async with tool_rig(SOURCE, "ok", asked=asked) as one:
        make = functools.partial(one.client.post, PATH, headers={"idempotency-key": "k"})
        first = (await make(json={"input": "hi"})).json()
        assert (await make(json={"input": "hi"})).json() == first
        assert len(asked) == 1
        await one.client.delete(f"{PATH}/{first['id']}")
        for body in ({"input": "hi"}, {"input": "something else"}):
            refused = await make(json=body)
            status, error = error_of(refused)
            assert (status, error["code"], error["param"]) == (409, "response_deleted", "Idempotency-Key")
            assert 30 < int(refused.headers["retry-after"]) <= 60
        await found_nothing(await one.client.get(f"{PATH}/{first['id']}?stream=true&starting_after=6"))
        one.pool.state.forgotten[first["id"]] -= FORGOTTEN_FOR_MS
        assert error_of(await make(json={"input": "hi"}))[0] == 409
        await one.pool.sweep()
        other = await make(json={"input": "something else"})
        assert (other.status_code, other.json()["id"], len(asked)) == (200, first["id"], 2)


async def test_a_call_that_is_repeated_while_its_response_is_deleted_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tool_rig(SOURCE, "ok") as one:
        make = functools.partial(one.client.post, PATH, headers={"idempotency-key": "k"})
        name = (await make(json={"input": "hi"})).json()["id"]
        looked_up, parent = 0, one.pool.parent

        async def parent_before_deletion(parent_name: str) -> Parent:
            nonlocal looked_up
            found = await parent(parent_name)
            looked_up += 1
            if looked_up == 2:
                await one.pool.forget(name)
            return found

        monkeypatch.setattr(one.pool, "parent", parent_before_deletion)
        # The model refuses this body, so the gateway looks for the answer of an earlier call.
        status, error = error_of(await make(json={"input": "hi " * 50_000}))
        assert (status, error["code"], looked_up) == (409, "response_deleted", 2)


async def found_nothing(response: httpx.Response) -> None:
    status, error = error_of(response)
    assert (status, error["code"]) == (404, "not_found")


async def test_only_stored_responses_are_found() -> None:
    async with tool_rig(SOURCE, "ok") as one:
        hidden = await created(one, store=False)
        chat = await one.chat(max_tokens=5)
        for name in (hidden["id"], chat["id"], "resp_none"):
            await found_nothing(await one.client.get(f"{PATH}/{name}"))
            await found_nothing(await one.client.get(f"{PATH}/{name}?stream=true"))
            await found_nothing(await one.client.post(f"{PATH}/{name}/cancel"))
            await found_nothing(await one.client.delete(f"{PATH}/{name}"))
        shown = await created(one)
        await found_nothing(await one.client.get(f"/v1/requests/{shown['id']}/events"))
        status, error = error_of(await one.client.get(f"{PATH}/{shown['id']}?stream=true&starting_after=x"))
        assert (status, error["param"]) == (400, "starting_after")
        for query, param in (("stream=x", "stream"), ("starting_after=1", "starting_after")):
            status, error = error_of(await one.client.get(f"{PATH}/{shown['id']}?{query}"))
            assert (status, error["param"]) == (400, param)


async def test_responses_wait_for_the_newer_schema() -> None:
    pool = MemoryPool(WallClock())
    pool.state.schema = 2
    async with tool_rig(SOURCE, pool=pool) as one:
        status, error = error_of(await one.post(PATH, input="hi"))
    assert (status, error["param"]) == (400, "input")


async def test_what_a_client_did_not_let_store_is_shown_on_no_path() -> None:
    async with tool_rig(SOURCE, "ok") as one:
        for store in (True, False):
            answer = (await one.post(PATH, input="hi", store=store)).json()
            for path in (f"/v1/requests/{answer['id']}", f"/v1/requests/{answer['id']}/result"):
                assert (await one.client.get(path)).status_code == (200 if store else 404)


BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata: has 17 names, more than 16"),
    ({"metadata": {"a" * 65: "x"}}, "metadata: "),
    ({"metadata": {"a": "x" * 513}}, "metadata: "),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id: is required"),
]


@pytest.mark.parametrize(("body", "message"), BOUNDS)
async def test_bounds_of_openai_hold(body: dict[str, Any], message: str) -> None:
    async with tool_rig(SOURCE, "ok") as one:
        fits = {"metadata": {f"{i:064}": "x" * 512 for i in range(16)}}
        assert (await one.post(PATH, input="hi", **fits)).status_code == 200
        status, error = error_of(await one.post(PATH, **{"input": "hi", **body}))
        assert (status, error["param"]) == (400, message.partition(":")[0])
        assert error["message"].startswith(message)
