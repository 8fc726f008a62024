"""The recording client against servers of a few lines: what it sends again, where it resumes, when it stops."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from checker.clients.client import CallProgress, Client
from checker.clients.workload import PlannedCall
from checker.history.records import Answered, Closed, Event, HistoryWriter, Left, PoolLog, Record, Refused, Sent
from checker.rules.verdict import judge

Handler = Callable[[httpx.Request], httpx.Response]


def token(index: int, choice: int = 0) -> bytes:
    part = {"index": choice, "text": f"<{index}>", "token_ids": [index], "finish_reason": None}
    return _sse(f"{choice}.{index}", json.dumps({"id": "cmpl-1", "choices": [part]}))


def end(choice: int = 0) -> bytes:
    part = {"index": choice, "text": "", "token_ids": [], "finish_reason": "length", "stop_reason": None}
    return _sse(f"{choice}.end", json.dumps({"id": "cmpl-1", "choices": [part]}))


def failure(event_id: str | None) -> bytes:
    return _sse(event_id, json.dumps({"error": {"code": "failed", "message": "", "type": "server_error"}}))


DONE = b"id: end\ndata: [DONE]\n\n"


def _sse(event_id: str | None, data: str) -> bytes:
    return (f"id: {event_id}\n" if event_id else "").encode() + f"data: {data}\n\n".encode()


def stream(*events: bytes, breaks: bool = False) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        for event in events:
            # Cut where nothing is whole.
            yield event[:7]
            yield event[7:]
        if breaks:
            raise httpx.ReadError("broken")

    headers = {"content-type": "text/event-stream; charset=utf-8", "x-request-id": "cmpl-1"}
    return httpx.Response(200, headers=headers, content=body())


def refusal(code: str = "pool_full", status: int = 503) -> httpx.Response:
    return httpx.Response(status, headers={"retry-after": "0"}, json={"error": {"code": code}})


def plan(**changes: object) -> PlannedCall:
    body = {"prompt": [1, 2], "max_tokens": 3, "stream": True, "return_token_ids": True} | changes
    return PlannedCall(name="c0", due_s=0.0, path="/v1/completions", body=body)


async def record(
    folder: Path, handler: Handler, call: PlannedCall, *, can_resume: bool = True, patience_s: float = 20.0
) -> tuple[list[Record], CallProgress]:
    transport = httpx.MockTransport(handler)
    with HistoryWriter(folder / "history.jsonl") as history:
        async with httpx.AsyncClient(transport=transport) as http:
            urls = ["http://one", "http://two"]
            client = Client(urls, http, history, seed=1, can_resume=can_resume, patience_s=patience_s)
            progress = await client.call(call)
            assert progress.gateway is None
            assert client.in_flight() == ()
    return history.records, progress


def in_turn(seen: list[httpx.Request], *answers: httpx.Response | Exception) -> Handler:
    waiting = iter(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        answer = next(waiting)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handle


async def test_a_stream_is_recorded_event_by_event_and_judged_good(tmp_path: Path) -> None:
    seen: list[httpx.Request] = []
    handler = in_turn(seen, stream(token(0), token(1), token(2), end(), DONE))
    records, _ = await record(tmp_path, handler, plan())
    assert [r.id for r in records if isinstance(r, Event)] == ["0.0", "0.1", "0.2", "0.end", "end"]
    assert seen[0].headers["accept"] == "text/event-stream"
    assert judge(records).violations == ()


async def test_a_call_is_in_flight_at_the_gateway_that_answers_it(tmp_path: Path) -> None:
    found: list[tuple[tuple[str, ...], ...]] = []

    async def body() -> AsyncIterator[bytes]:
        yield token(0)
        found.append((client.in_flight(), client.in_flight(["one"]), client.in_flight(["two"])))
        yield token(1) + token(2) + end() + DONE

    headers = {"content-type": "text/event-stream", "x-request-id": "cmpl-1"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, content=body()))
    with HistoryWriter(tmp_path / "history.jsonl") as history:
        async with httpx.AsyncClient(transport=transport) as http:
            client = Client(["http://one", "http://two"], http, history, seed=1, can_resume=True)
            await client.call(plan())
    assert found == [(("c0",), ("c0",), ())]


async def test_a_broken_stream_is_resumed_at_the_other_gateway_after_each_choices_last_event(
    tmp_path: Path,
) -> None:
    seen: list[httpx.Request] = []
    first = stream(token(0), token(0, choice=1), token(1), end(choice=1), breaks=True)
    handler = in_turn(seen, first, stream(token(2), end(), DONE))
    records, _ = await record(tmp_path, handler, plan(n=2))
    assert str(seen[1].url) == "http://two/v1/requests/cmpl-1/events"
    assert (seen[1].method, seen[1].headers["last-event-id"]) == ("GET", "0.1,1.end")
    assert [r.cursor for r in records if isinstance(r, Answered)] == [None, "0.1,1.end"]


def going(last_event_id: str) -> bytes:
    """Return the last event of a gateway that shuts down before its stream has ended."""
    resume = {"request_id": "cmpl-1", "last_event_ids": [last_event_id]}
    data = {"error": {"code": "gateway_draining", "message": "", "type": "unavailable"}, "resume": resume}
    return b"event: resume\n" + _sse(None, json.dumps(data))


async def test_a_gateway_that_shuts_down_with_a_resume_place_is_no_failure(tmp_path: Path) -> None:
    seen: list[httpx.Request] = []
    handler = in_turn(seen, stream(token(0), token(1), going("0.1")), stream(token(2), end(), DONE))
    records, _ = await record(tmp_path, handler, plan())
    assert seen[1].headers["last-event-id"] == "0.1"
    assert judge(records).violations == ()


async def test_a_gateway_that_shuts_down_with_a_wrong_resume_place_is_an_error(tmp_path: Path) -> None:
    handler = in_turn([], stream(token(0), token(1), going("0.0")))
    records, _ = await record(tmp_path, handler, plan())
    assert "has_no_error" in {found.rule for found in judge(records).violations}


async def test_a_client_that_rewinds_asks_for_earlier_tokens_again(tmp_path: Path) -> None:
    seen: list[httpx.Request] = []
    handler = in_turn(seen, stream(token(0), token(1), breaks=True), stream(token(1), token(2), end(), DONE))
    call = PlannedCall(name="c0", due_s=0.0, path="/v1/completions", body=plan().body, rewind=1)
    records, _ = await record(tmp_path, handler, call)
    assert seen[1].headers["last-event-id"] == "0.0"
    assert judge(records).violations == ()


async def test_a_client_may_disconnect_on_purpose_and_come_back(tmp_path: Path) -> None:
    seen: list[httpx.Request] = []
    handler = in_turn(seen, stream(token(0), token(1)), stream(token(1), token(2), end(), DONE))
    call = PlannedCall(name="c0", due_s=0.0, path="/v1/completions", body=plan().body, drop_after=1)
    records, _ = await record(tmp_path, handler, call)
    assert seen[1].headers["last-event-id"] == "0.0"
    assert judge(records).violations == ()


async def test_a_post_that_breaks_before_its_headers_is_sent_again_under_the_same_key(tmp_path: Path) -> None:
    seen: list[httpx.Request] = []
    handler = in_turn(seen, httpx.ConnectError("no"), stream(token(0), token(1), token(2), end(), DONE))
    records, _ = await record(tmp_path, handler, plan())
    keys = [request.headers["idempotency-key"] for request in seen]
    assert keys[0] == keys[1]
    assert len([r for r in records if isinstance(r, Sent)]) == 1
    assert [r.error is None for r in records if isinstance(r, Closed)] == [False, True]


@pytest.mark.parametrize(("status", "code"), [(503, "pool_full"), (429, "queue_full")])
async def test_a_refusal_is_waited_out_and_tried_as_a_new_attempt(tmp_path: Path, status: int, code: str) -> None:
    seen: list[httpx.Request] = []
    handler = in_turn(seen, refusal(code, status), stream(token(0), token(1), token(2), end(), DONE))
    records, _ = await record(tmp_path, handler, plan())
    assert [r.code for r in records if isinstance(r, Refused)] == [code]
    assert [r.attempt for r in records if isinstance(r, Sent)] == [0, 1]
    assert seen[0].headers["idempotency-key"] != seen[1].headers["idempotency-key"]
    assert judge(records).violations == ()


async def test_a_closed_port_while_resuming_is_no_refusal(tmp_path: Path) -> None:
    handler = in_turn([], stream(token(0), breaks=True), refusal(), stream(token(1), token(2), end(), DONE))
    records, _ = await record(tmp_path, handler, plan())
    assert not any(isinstance(r, Refused) for r in records)
    assert judge(records).violations == ()


async def test_a_model_that_was_replaced_is_an_end_and_no_refusal(tmp_path: Path) -> None:
    records, _ = await record(tmp_path, in_turn([], refusal("model_replaced")), plan(stream=False))
    assert judge(records).harms["lost"] == 1


async def test_without_a_way_to_resume_a_broken_stream_is_given_up_and_lost(tmp_path: Path) -> None:
    records, _ = await record(tmp_path, in_turn([], stream(token(0), breaks=True)), plan(), can_resume=False)
    assert "no way to resume" in next(r.reason for r in records if isinstance(r, Left))
    assert judge(records).harms["lost"] == 1


async def test_a_request_that_the_server_forgot_is_lost(tmp_path: Path) -> None:
    gone = httpx.Response(404, json={"error": {"code": "unknown_request"}})
    records, _ = await record(tmp_path, in_turn([], stream(token(0), breaks=True), gone), plan())
    assert judge(records).error_ends == 1


async def test_a_failed_choice_leaves_the_others_to_their_ends(tmp_path: Path) -> None:
    events = stream(token(0), failure("1.end"), token(1), token(2), end())
    records, _ = await record(tmp_path, in_turn([], events), plan(n=2))
    assert [r.id for r in records if isinstance(r, Event)][-1] == "0.end"
    assert [found.rule for found in judge(records).violations] == ["has_no_error"]


async def test_a_failure_of_the_whole_stream_ends_it(tmp_path: Path) -> None:
    records, _ = await record(tmp_path, in_turn([], stream(token(0), failure(None))), plan())
    assert judge(records).error_ends == 1


async def test_an_accepted_call_that_ended_by_its_deadline_keeps_its_name(tmp_path: Path) -> None:
    answer = httpx.Response(504, headers={"x-request-id": "cmpl-1"}, json={"error": {"code": "deadline_exceeded"}})
    body = plan(stream=False, deadline_ms=0).body
    call = PlannedCall(name="c0", due_s=0.0, path="/v1/completions", body=body, intent="deadline")
    records, progress = await record(tmp_path, in_turn([], answer), call)
    assert progress.request_id == "cmpl-1"
    log = PoolLog(at=9.0, request="cmpl-1.0", tokens=(), reason="deadline_exceeded", count=0)
    assert judge([*records, log]).violations == ()


async def test_a_client_that_is_planned_to_leave_leaves(tmp_path: Path) -> None:
    call = PlannedCall(name="c0", due_s=0.0, path="/v1/completions", body=plan().body, intent="cancel", leave_after=2)
    records, _ = await record(tmp_path, in_turn([], stream(token(0), token(1), token(2), end(), DONE)), call)
    assert len([r for r in records if isinstance(r, Event)]) == 2
    assert judge(records).violations == ()


async def test_a_whole_answer_is_recorded_as_one_event(tmp_path: Path) -> None:
    choice = {"index": 0, "text": "abc", "finish_reason": "length", "stop_reason": None, "token_ids": [1, 2, 3]}
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    answer = {"id": "cmpl-1", "choices": [choice], "usage": usage}
    response = httpx.Response(200, headers={"x-request-id": "cmpl-1"}, json=answer)
    records, _ = await record(tmp_path, in_turn([], response), plan(stream=False))
    assert judge(records, lambda ids: "abc"[: len(ids)]).violations == ()


async def test_a_slow_call_is_followed_as_long_as_bytes_arrive(tmp_path: Path) -> None:
    async def body() -> AsyncIterator[bytes]:
        for event in (token(0), token(1), token(2), token(3), token(4), end(), DONE):
            await asyncio.sleep(0.7)
            yield event

    headers = {"content-type": "text/event-stream", "x-request-id": "cmpl-1"}
    slow = in_turn([], httpx.Response(200, headers=headers, content=body()))
    records, _ = await record(tmp_path, slow, plan(max_tokens=5), patience_s=4.0)
    assert not any(isinstance(r, Left) for r in records)


async def test_an_accepted_call_whose_answer_was_cut_is_repeated_under_its_key(tmp_path: Path) -> None:
    cut = httpx.Response(503, headers={"x-request-id": "cmpl-1", "retry-after": "0"}, json={"error": {"code": "busy"}})
    choice = {"index": 0, "text": "abc", "finish_reason": "length", "token_ids": [1, 2, 3]}
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    answer = {"id": "cmpl-1", "choices": [choice], "usage": usage}
    seen: list[httpx.Request] = []
    whole = httpx.Response(200, headers={"x-request-id": "cmpl-1"}, json=answer)
    answers = (cut, refusal("pool_unavailable"), whole)
    records, _ = await record(tmp_path, in_turn(seen, *answers), plan(stream=False))
    assert len(seen) == 3
    assert len({request.headers["idempotency-key"] for request in seen}) == 1
    verdict = judge(records, lambda ids: "abc"[: len(ids)])
    assert (verdict.requests, verdict.refused, verdict.violations) == (1, 0, ())


async def test_a_call_without_an_end_is_given_up_in_time_and_lost(tmp_path: Path) -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody there")

    records, _ = await record(tmp_path, handle, plan(), patience_s=0.1)
    assert "no event for" in next(r.reason for r in records if isinstance(r, Left))
    verdict = judge(records)
    assert (verdict.unaccepted, verdict.harms["lost"]) == (0, 1)
