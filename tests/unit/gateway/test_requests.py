"""Requests by their id: state, result, cancelling, calls in the background, and whose they are."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orca.core.domain.request import FinishReason
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import MODEL, WORDS, Rig, error_of, ids, rig, until

BODY = {"prompt": "the fox", "max_tokens": 50}
TWO_KEYS = GatewaySettings(model="tiny", api_keys=("mine", "yours"))
MINE, YOURS = {"authorization": "Bearer mine"}, {"authorization": "Bearer yours"}


async def in_background(one: Rig, headers: Any = None, **body: Any) -> str:
    """The id of a call that was accepted and is not waited for."""
    response = await one.client.post("/v1/completions", json=BODY | {"background": True} | body, headers=headers)
    assert response.status_code == 202, response.text
    request_id: str = response.json()["id"]
    return request_id


async def state(one: Rig, request_id: str) -> dict[str, Any]:
    response = await one.client.get(f"/v1/requests/{request_id}")
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


async def ended(one: Rig, request_id: str) -> None:
    await until(lambda: one.pool.state.parents[request_id].left == 0)


async def test_a_background_call_is_answered_with_its_id_and_its_url() -> None:
    async with rig() as one:
        one.scheduler.may_run.clear()
        response = await one.client.post("/v1/completions", json=BODY | {"background": True})
        document = response.json()
        path = f"/v1/requests/{document['id']}"
        assert (response.status_code, response.headers["location"]) == (202, path)
        assert document["urls"] == {"state": path, "events": f"{path}/events", "result": f"{path}/result"}
        assert document["choices"][0]["finish_reason"] is None
        assert document["choices"][0]["error"] is None
        one.scheduler.may_run.set()


async def test_the_prefer_header_makes_a_background_call_too() -> None:
    async with rig() as one:
        headers = {"prefer": "wait=5, respond-async"}
        response = await one.client.post("/v1/completions", json=BODY, headers=headers)
        assert (response.status_code, response.headers["preference-applied"]) == (202, "respond-async")


@pytest.mark.parametrize("body", [{}, {"n": 3, "seed": 1}, {"echo": True, "logprobs": 1}, {"stop": " and"}], ids=str)
async def test_the_result_has_the_bytes_of_an_unstreamed_call(body: dict[str, Any]) -> None:
    async with rig() as one, rig(pool=one.pool, schedules=False) as two:
        headers = {"idempotency-key": "k"}
        whole = await one.client.post("/v1/completions", json=BODY | body, headers=headers)
        result = await two.client.get(f"/v1/requests/{whole.json()['id']}/result")
        assert (result.content, result.headers["content-type"]) == (whole.content, "application/json")


async def test_a_stream_and_a_background_call_have_results_and_events_too() -> None:
    async with rig() as one:
        request_id = await in_background(one, stream=True, stream_options={"include_usage": True})
        events = await one.client.get(f"/v1/requests/{request_id}/events")
        assert '"usage":{' in events.text
        assert events.text.endswith("data: [DONE]\n\n")
        result = (await one.client.get(f"/v1/requests/{request_id}/result")).json()
        assert result["choices"][0]["text"] == WORDS


async def test_the_state_has_the_text_so_far_and_the_result_waits_for_the_end() -> None:
    async with rig() as one:
        one.scheduler.turns_left = 4
        request_id = await in_background(one, n=2)
        await until(lambda: [len(record.log) for record in one.pool.state.records.values()] == [4, 4])
        document = await state(one, request_id)
        assert document["status"] == "running"
        assert [choice["tokens"] for choice in document["choices"]] == [4, 4]
        assert WORDS.startswith(document["choices"][1]["text"])
        result = await one.client.get(f"/v1/requests/{request_id}/result")
        assert (result.status_code, result.headers["retry-after"], result.json()) == (202, "1", document)
        one.scheduler.turns_left = None
        one.scheduler.may_run.set()
        await ended(one, request_id)
        choice = (await state(one, request_id))["choices"][0]
        assert (choice["status"], choice["text"], choice["finish_reason"]) == ("ended", WORDS, "length")
        assert choice["tokens"] == len(ids(WORDS))


async def test_a_cancelled_request_reports_that_after_any_number_of_cancels() -> None:
    async with rig() as one:
        one.scheduler.turns_left = 2
        request_id = await in_background(one)
        await until(lambda: [len(record.log) for record in one.pool.state.records.values()] == [2])
        for _ in range(2):
            response = await one.client.delete(f"/v1/requests/{request_id}")
            choice = response.json()["choices"][0]
            assert (response.status_code, response.json()["status"]) == (200, "ended")
            assert (choice["finish_reason"], choice["tokens"]) == ("cancelled", 2)
        status, error = error_of(await one.client.get(f"/v1/requests/{request_id}/result"))
        assert (status, error["code"]) == (409, "cancelled")


async def test_a_request_of_another_revision_can_be_cancelled_but_has_no_text_here() -> None:
    async with rig() as one, rig(pool=one.pool, model=replace(MODEL, revision="r2"), schedules=False) as newer:
        one.scheduler.turns_left = 2
        request_id = await in_background(one)
        await until(lambda: [len(record.log) for record in one.pool.state.records.values()] == [2])
        response = await newer.client.delete(f"/v1/requests/{request_id}")
        choice = response.json()["choices"][0]
        assert (response.status_code, choice["finish_reason"], choice["text"]) == (200, "cancelled", None)
        assert (choice["tokens"], (await state(one, request_id))["choices"][0]["tokens"]) == (2, 2)


async def test_cancelling_an_ended_request_changes_nothing() -> None:
    async with rig() as one:
        answer = await one.complete()
        response = await one.client.delete(f"/v1/requests/{answer['id']}")
        assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_a_cancel_ends_the_stream_that_another_gateway_writes() -> None:
    async with rig() as one, rig(pool=one.pool, schedules=False) as two:
        one.scheduler.turns_left = 2
        posting = asyncio.create_task(one.post("/v1/completions", **BODY, stream=True))
        await until(lambda: [len(record.log) for record in one.pool.state.records.values()] == [2])
        await two.client.delete(f"/v1/requests/{next(iter(one.pool.state.parents))}")
        assert '"code":"cancelled"' in (await posting).text


@pytest.mark.parametrize("path", ["", "/events", "/result"])
async def test_only_its_owner_can_see_a_request(path: str) -> None:
    async with rig(settings=TWO_KEYS) as one:
        request_id = await in_background(one, MINE)
        await ended(one, request_id)
        assert (await one.client.get(f"/v1/requests/{request_id}{path}", headers=MINE)).status_code == 200
        theirs = await one.client.get(f"/v1/requests/{request_id}{path}", headers=YOURS)
        nobodys = await one.client.get(f"/v1/requests/none{path}", headers=YOURS)
        assert theirs.status_code == nobodys.status_code == 404
        assert theirs.text.replace(request_id, "none") == nobodys.text


async def test_only_its_owner_can_cancel_a_request() -> None:
    async with rig(settings=TWO_KEYS) as one:
        one.scheduler.may_run.clear()
        request_id = await in_background(one, MINE)
        assert (await one.client.delete(f"/v1/requests/{request_id}", headers=YOURS)).status_code == 404
        assert one.pool.state.parents[request_id].left == 1
        one.scheduler.may_run.set()


async def test_a_background_call_that_cancels_on_disconnect_is_refused() -> None:
    async with rig() as one:
        status, error = await one.error("/v1/completions", **BODY, background=True, on_disconnect="cancel")
        assert (status, error["param"]) == (400, "on_disconnect")


async def test_an_unknown_value_for_disconnects_is_refused_with_a_reason() -> None:
    async with rig() as one:
        _, error = await one.error("/v1/completions", **BODY, on_disconnect="explode")
        assert error["message"] == "on_disconnect: must be 'cancel' or 'keep', not 'explode'"


async def test_the_result_of_a_failed_call_is_its_error() -> None:
    async with rig() as one:
        one.scheduler.reason = FinishReason.ERROR
        request_id = await in_background(one)
        await ended(one, request_id)
        status, error = error_of(await one.client.get(f"/v1/requests/{request_id}/result"))
        assert (status, error["code"]) == (500, "failed")


@pytest.mark.parametrize("path", ["", "/result"])
async def test_a_request_that_is_forgotten_while_it_is_read_is_not_found(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig() as one:
        request_id = (await one.complete())["id"]

        async def forgotten(starts: dict[str, int]) -> dict[str, None]:
            return dict.fromkeys(starts)

        monkeypatch.setattr(one.pool, "read_many", forgotten)
        status, error = error_of(await one.client.get(f"/v1/requests/{request_id}{path}"))
        assert (status, error["code"]) == (404, "unknown_request")
