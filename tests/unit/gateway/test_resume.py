"""A stream is read on at any gateway: from each event of each choice the same bytes come as at the first."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.request import End, FinishReason, Token
from orca.gateway.errors import ApiError
from orca.gateway.render.cursor import ResumedChoice, parse_cursor
from orca.gateway.render.render import AnswerKind, ChoiceStream, RenderModel, RenderOptions
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import MODEL, Rig, error_of, events, ids, make_request, rig, tokenizer, until
from support.gateway.gateway_server import LIMIT_SECONDS, served

EVENT_STREAM = {"accept": "text/event-stream"}


@contextlib.asynccontextmanager
async def two_gateways(pool: MemoryPool | None = None) -> AsyncIterator[tuple[Rig, Rig]]:
    """The first one has the scheduler behind it; both have the same pool."""
    async with rig(pool=pool) as first, rig(pool=first.pool, schedules=False) as second:
        yield first, second


def blocks(stream: str) -> list[str]:
    return [block + "\n\n" for block in stream.split("\n\n")[:-1]]


def of_choice(stream: str, choice: int) -> list[str]:
    return [block for block in blocks(stream) if block.startswith(f"id: {choice}.")]


def behind(stream: str) -> list[str]:
    """Return the events after the ends of all choices: usage if asked for, and `[DONE]`."""
    return [block for block in blocks(stream) if not block[4:5].isdigit()]


async def posted(one: Rig, path: str = "/v1/completions", **body: Any) -> tuple[str, str]:
    """A whole stream: its id and its text."""
    body = {
        "prompt": "the fox",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 50,
        "stream": True,
    } | body
    response = await one.client.post(path, json=body, headers=EVENT_STREAM)
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"], response.text


async def resumed(one: Rig, request_id: str, cursor: str = "") -> httpx.Response:
    return await one.client.get(f"/v1/requests/{request_id}/events", headers={"last-event-id": cursor})


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    *(
        (path, body)
        for path in (COMPLETIONS, CHAT)
        for body in (
            {},
            {"n": 3, "seed": 4},
            {"stop": [" and more!", "🐋."]},
            {"stop": [" and"], "n": 2},
            {"stop": [" and more"], "include_stop_str_in_output": True, "skip_special_tokens": False},
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True},
        )
    ),
    (COMPLETIONS, {"echo": True, "logprobs": 2, "n": 2}),
    (COMPLETIONS, {"prompt": ["a", "the"]}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
]


@pytest.mark.parametrize(("path", "body"), ANSWERS, ids=str)
async def test_a_second_gateway_resumes_after_every_event_with_the_same_bytes(path: str, body: dict[str, Any]) -> None:
    async with two_gateways() as (first, second):
        request_id, whole = await posted(first, path, **body)
        choices = len({block.split(".")[0] for block in blocks(whole) if block[4:5].isdigit()})
        logs = [of_choice(whole, choice) for choice in range(choices)]
        for place in range(max(map(len, logs))):
            # Each choice is cut elsewhere.
            cuts = [(place + 3 * choice) % len(log) for choice, log in enumerate(logs)]
            cursor = ",".join(log[cut].split("\n")[0].removeprefix("id: ") for log, cut in zip(logs, cuts, strict=True))
            rest = (await resumed(second, request_id, cursor)).text
            assert [of_choice(rest, choice) for choice in range(choices)] == [
                log[cut + 1 :] for log, cut in zip(logs, cuts, strict=True)
            ]
            assert behind(rest) == behind(whole)


async def test_without_a_cursor_the_stream_starts_at_its_beginning_with_ids() -> None:
    async with two_gateways() as (first, second):
        request_id, whole = await posted(first)
        response = await resumed(second, request_id)
        assert response.text == whole
        assert response.headers["x-request-id"] == request_id
        assert response.headers["content-type"].startswith("text/event-stream")


async def test_a_call_that_asked_for_no_ids_is_resumed_with_them() -> None:
    async with two_gateways() as (first, second):
        response = await first.post("/v1/completions", prompt="a", max_tokens=3, stream=True)
        found = list(events((await resumed(second, response.headers["x-request-id"], "0.1")).text))
        assert [event_id for event_id, _ in found] == ["0.2", "0.end", "end"]


@pytest.mark.parametrize("cursor", ["", "0.2", "0.end"])
async def test_an_end_that_preceded_the_resume_is_not_counted_again(cursor: str) -> None:
    async with rig() as one:
        request_id, _ = await posted(one, max_tokens=5)
        await resumed(one, request_id, cursor)
        told = (await one.client.get("/metrics")).text
        assert 'orca_request_success_total{finished_reason="length",model_name="tiny"} 1.0' in told
        assert 'orca_request_generation_tokens_count{model_name="tiny"} 1.0' in told


async def test_an_end_after_the_resume_is_counted_by_the_resuming_gateway() -> None:
    async with two_gateways() as (first, second):
        first.scheduler.turns_left = 2
        async with asyncio.timeout(LIMIT_SECONDS):
            leaving = asyncio.create_task(posted(first, n=2, max_tokens=5))
            await until(lambda: [len(record.log) for record in first.pool.state.records.values()] == [2, 2])
            (request_id,) = first.pool.state.parents
            coming = asyncio.create_task(resumed(second, request_id, "0.1,1.1"))
            await until(lambda: len(first.pool.state.parents[request_id].readers) == 2)
            leaving.cancel()
            first.scheduler.turns_left = None
            first.scheduler.may_run.set()
            await coming
        told = (await second.client.get("/metrics")).text
        assert 'orca_request_success_total{finished_reason="length",model_name="tiny"} 2.0' in told


async def test_the_query_can_give_the_cursor_instead_of_a_header() -> None:
    async with two_gateways() as (first, second):
        request_id, whole = await posted(first)
        response = await second.client.get(f"/v1/requests/{request_id}/events", params={"starting_after": "0.4"})
        assert blocks(response.text) == blocks(whole)[5:]


async def test_a_client_that_has_read_everything_gets_204() -> None:
    async with two_gateways() as (first, second):
        request_id, whole = await posted(first)
        response = await resumed(second, request_id, "end")
        assert (response.status_code, response.content) == (204, b"")
        assert (await resumed(second, request_id, "0.end")).text == blocks(whole)[-1]


@pytest.mark.parametrize(
    ("cursor", "words"),
    [
        ("0.3", "missing choices: 1"),
        ("0.3,1.x", "'1.x' is not an event id"),
        ("0.3,1.03", "'1.03' is not an event id"),
        ("0.3,1.2,2.0", "2.0 names choice 2, but the request has 2"),
        ("0.3,1.2,0.4", "choice 0 is named twice"),
        ("0.3,1.999", "there is no event 1.999 yet"),
        ("0.3,end", "'end' is not an event id"),
    ],
)
async def test_a_cursor_that_is_no_place_of_the_answer_is_refused_with_a_reason(cursor: str, words: str) -> None:
    async with two_gateways() as (first, second):
        request_id, _ = await posted(first, n=2)
        status, error = error_of(await resumed(second, request_id, cursor))
        assert (status, error["code"], error["param"]) == (400, "invalid_cursor", "Last-Event-ID")
        assert words in error["message"]
        status, error = error_of(await first.client.get(f"/v1/requests/{request_id}/events?starting_after={cursor}"))
        assert (status, error["code"], error["param"]) == (400, "invalid_cursor", "starting_after")
        assert error["message"].startswith("starting_after: ")


async def test_a_choice_without_events_is_named_by_its_start_in_the_cursor() -> None:
    async with two_gateways() as (first, second):
        request_id, whole = await posted(first, n=2)
        response = await resumed(second, request_id, "0.3,1.start")
        wanted = [event_id for event_id, _ in events(whole) if event_id not in {"0.0", "0.1", "0.2", "0.3"}]
        assert sorted(event_id for event_id, _ in events(response.text)) == sorted(wanted)


def test_spaces_and_empty_parts_of_a_cursor_are_ignored() -> None:
    assert parse_cursor(" 0.1 ,, 1.end", 2) == {0: "0.1", 1: "1.end"}
    assert parse_cursor(" , ", 2) == parse_cursor("0.start,1.start", 2) == {}
    with pytest.raises(ApiError):
        parse_cursor("0.1234567890", 1)


async def test_a_cursor_at_an_end_that_has_not_come_is_refused() -> None:
    async with two_gateways() as (first, second):
        first.scheduler.turns_left = 3
        posting = asyncio.create_task(posted(first))
        await until(lambda: [record for record in first.pool.state.records.values() if len(record.log) == 3])
        (request_id,) = first.pool.state.parents
        status, error = error_of(await resumed(second, request_id, "0.end"))
        assert (status, error["code"]) == (400, "invalid_cursor")
        first.scheduler.turns_left = None
        first.scheduler.may_run.set()
        await posting


async def test_a_resumed_stream_follows_a_log_that_still_grows() -> None:
    async with two_gateways() as (first, second):
        first.scheduler.turns_left = 4
        posting = asyncio.create_task(posted(first))
        await until(lambda: [record for record in first.pool.state.records.values() if len(record.log) == 4])
        (request_id,) = first.pool.state.parents
        reading = asyncio.create_task(resumed(second, request_id, "0.1"))
        await until(lambda: len(first.pool.state.parents[request_id].readers) == 2)
        first.scheduler.turns_left = None
        first.scheduler.may_run.set()
        assert blocks((await reading).text) == blocks((await posting)[1])[2:]
        await until(lambda: not any(one.app.state.gateway.readers._open for one in (first, second)))
        await until(lambda: len(first.pool.state.parents[request_id].readers) == 1)


async def test_reading_an_ended_answer_repeatedly_adds_no_reader_entries() -> None:
    async with rig() as one:
        request_id, _ = await posted(one)
        for _ in range(5):
            assert (await resumed(one, request_id)).status_code == 200
        await until(lambda: len(one.pool.state.parents[request_id].readers) <= 1)


async def test_an_unknown_request_is_not_found() -> None:
    async with rig() as one:
        status, error = error_of(await resumed(one, "cmpl-none"))
        assert (status, error["code"]) == (404, "unknown_request")


async def test_a_record_that_this_gateway_cannot_render_gets_no_reader_entry() -> None:
    async with rig() as one:
        request_id, _ = await posted(one)
        record = one.pool.state.parents[request_id]
        readers = dict(record.readers)
        record.submission = replace(record.submission, render='{"of another": "release"}')
        assert (await resumed(one, request_id)).status_code == 500
        assert record.readers == readers


async def test_a_gateway_without_the_tokenizer_of_the_revision_does_not_render_it() -> None:
    async with rig() as one, rig(pool=one.pool, model=replace(MODEL, revision="r2"), schedules=False) as newer:
        request_id, _ = await posted(one)
        response = await resumed(newer, request_id)
        assert (response.headers["retry-after"], error_of(response)[1]["code"]) == ("1", "revision_not_served")


async def test_a_resumed_stream_that_is_cut_names_the_place_of_its_client() -> None:
    async with served() as one:
        one.rig.scheduler.turns_left = 4
        await one.open_stream(n=2)
        await until(lambda: [len(record.log) for record in one.rig.pool.state.records.values()] == [4, 4])
        (request_id,) = one.rig.pool.state.parents
        head = f"GET /v1/requests/{request_id}/events HTTP/1.1\r\nhost: orca\r\nlast-event-id: 0.1,1.3\r\n\r\n"
        reader, _ = await one.open(head.encode())
        await asyncio.wait_for(reader.readuntil(b"id: 0.3\n"), LIMIT_SECONDS)
        one.rig.app.state.gateway.drain.cut()
        rest = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), LIMIT_SECONDS)
        assert b'"last_event_ids":["0.3","1.3"]' in rest
        assert b"id: 1." not in rest


def test_a_resumed_choice_without_new_events_keeps_the_place_of_its_client() -> None:
    request = make_request()
    rendering = RenderOptions(kind=AnswerKind.COMPLETION, model="tiny", created=0)
    choice = ResumedChoice(ChoiceStream(request, rendering, RenderModel(tokenizer(), frozenset())), "0.1")
    assert [choice.token(Token(token_id)) for token_id in ids("ab")] == [b"", b""]
    assert choice.last_event_id == "0.1"
    assert choice.end(End(FinishReason.LENGTH, 2))
    assert choice.last_event_id == "0.end"


@pytest.mark.parametrize("call", ["parent", "status", "attach"])
async def test_while_the_pool_is_unreachable_a_resume_is_503_with_retry_after(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise PoolUnavailable("away")

    async with rig() as one:
        request_id, _ = await posted(one)
        monkeypatch.setattr(one.pool, call, away)
        response = await resumed(one, request_id, "0.1")
        assert (response.headers["retry-after"], error_of(response)[1]["code"]) == ("1", "pool_unavailable")


async def test_connections_that_read_the_same_log_at_one_gateway_do_not_take_each_others_tokens() -> None:
    async with rig() as one:
        one.scheduler.turns_left = 4
        posting = asyncio.create_task(posted(one))
        await until(lambda: [record for record in one.pool.state.records.values() if len(record.log) == 4])
        (request_id,) = one.pool.state.parents
        reading = [asyncio.create_task(resumed(one, request_id, cursor)) for cursor in ("", "0.2")]
        await until(lambda: len(one.pool.state.parents[request_id].readers) == 3)
        one.scheduler.turns_left = None
        one.scheduler.may_run.set()
        whole = (await posting)[1]
        assert [(await one).text for one in reading] == [whole, "".join(blocks(whole)[3:])]
