"""Calls that are right and still get no answer: the pool is full or away, or their requests ended from outside."""

from dataclasses import replace
from typing import Any

import pytest

from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.request import FinishReason
from orca.gateway.calls import submit
from orca.gateway.models.models import Models
from orca.pool.records import Submission
from orca.pool.settings import PoolSettings
from support.gateway.gateway_rig import MODEL, error_of, events, rig, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


async def test_a_full_queue_is_429_with_retry_after() -> None:
    async with rig(schedules=False, pool_settings=PoolSettings(max_queued=1)) as one:
        response = await one.post(COMPLETIONS, prompt=["a", "b"], max_tokens=2)
        assert error_of(response)[0] == 429
        assert int(response.headers["retry-after"]) >= 1


async def test_a_pool_without_room_is_503_with_retry_after() -> None:
    async with rig(schedules=False, pool_settings=PoolSettings(bytes_max=10)) as one:
        response = await one.post(COMPLETIONS, prompt="a", max_tokens=2)
        status, error = error_of(response)
        assert (status, error["code"]) == (503, "pool_full")
        assert int(response.headers["retry-after"]) >= 1


async def test_an_unreachable_pool_is_503_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: Any) -> Any:
        raise PoolUnavailable("no answer")

    async with rig(schedules=False) as one:
        monkeypatch.setattr(one.pool, "submit", away)
        response = await one.post(COMPLETIONS, prompt="a")
        status, error = error_of(response)
        assert (status, error["code"]) == (503, "pool_unavailable")
        assert int(response.headers["retry-after"]) >= 1


async def test_a_revision_that_is_not_current_is_503() -> None:
    async with rig(schedules=False) as one:
        served = one.app.state.gateway.models.current
        one.app.state.gateway.models = Models(replace(served, info=replace(MODEL, revision="another")))
        status, error = await one.error(COMPLETIONS, prompt="a")
        assert (status, error["code"]) == (503, "revision_not_served")


async def test_an_internal_error_is_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    async with rig(schedules=False) as one:
        monkeypatch.setattr(one.pool, "submit", broken)
        status, error = await one.error(COMPLETIONS, prompt="a")
        assert (status, error["message"]) == (500, "internal error")
        counted = 'orca_http_requests_total{method="POST",route="/v1/completions",status="500"} 1.0'
        assert counted in (await one.client.get("/metrics")).text


@pytest.mark.parametrize(
    ("reason", "status", "told"),
    [
        (FinishReason.DEADLINE_EXCEEDED, 504, "false"),
        (FinishReason.CANCELLED, 409, "false"),
        (FinishReason.ERROR, 500, "false"),
        (FinishReason.MODEL_REPLACED, 503, None),
    ],
)
async def test_clients_are_told_not_to_retry_a_finished_call(
    reason: FinishReason, status: int, told: str | None
) -> None:
    async with rig() as one:
        one.scheduler.reason = reason
        response = await one.post(COMPLETIONS, prompt="a")
        assert error_of(response)[0] == status
        assert response.headers.get("x-should-retry") == told


@pytest.mark.parametrize("body", [{}, {"n": 3}, {"prompt": ["a", "b"]}], ids=["one", "n", "prompts"])
async def test_what_the_model_refuses_is_a_400_with_its_reason(body: dict[str, Any]) -> None:
    async with rig() as one:
        one.scheduler.reason, one.scheduler.detail = FinishReason.REFUSED, "token 7 has no row"
        status, error = await one.error(COMPLETIONS, **({"prompt": "a"} | body))
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "request_refused")
        assert error["message"] == "the model cannot run this request: token 7 has no row"
        counted = (await one.client.get("/metrics")).text
        assert 'finished_reason="refused"' in counted


async def test_what_the_model_refuses_ends_a_stream_with_its_reason() -> None:
    async with rig() as one:
        one.scheduler.reason, one.scheduler.detail = FinishReason.REFUSED, "token 7 has no row"
        response = await one.post(COMPLETIONS, prompt="a", stream=True, max_tokens=3)
        *tokens, (_, last) = events(response.text)
        assert len(tokens) == 3, "those that came before"
        assert last["error"]["code"] == "request_refused"
        assert "token 7 has no row" in last["error"]["message"]


async def test_a_refusal_is_the_result_of_a_call_in_the_background() -> None:
    async with rig() as one:
        one.scheduler.reason, one.scheduler.detail = FinishReason.REFUSED, "token 7 has no row"
        document = (await one.post(COMPLETIONS, prompt="a", background=True)).json()
        path = f"/v1/requests/{document['id']}"
        await until(lambda: [parent.left for parent in one.pool.state.parents.values()] == [0])
        [choice] = (await one.client.get(path)).json()["choices"]
        _, error = error_of(await one.client.get(f"{path}/result"))
        assert (choice["finish_reason"], error["code"]) == ("refused", "request_refused")
        assert choice["error"] == error


async def test_a_stored_background_call_is_accepted_even_if_the_pool_fails_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def away(*_: Any) -> Any:
        raise PoolUnavailable("no answer")

    async with rig(schedules=False) as one:
        for reading in ("parent", "status", "read_many"):
            monkeypatch.setattr(one.pool, reading, away)
        answer = await one.client.post("/v1/completions", json={"prompt": "the fox", "background": True})
        document = answer.json()
        assert (answer.status_code, document["status"]) == (202, "queued")
        assert list(one.pool.state.parents) == [document["id"]]


async def test_stored_requests_of_a_refused_call_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "TAKE_BACK_SECONDS", (0.01, 0.01))
    async with rig(schedules=False) as one:
        store = one.pool.submit

        async def lose_the_answer(submission: Submission) -> Any:
            await store(submission)
            raise PoolUnavailable("the reply was lost")

        monkeypatch.setattr(one.pool, "submit", lose_the_answer)
        answer = await one.client.post("/v1/completions", json={"prompt": "the fox", "background": True})
        assert (answer.status_code, error_of(answer)[1]["code"]) == (503, "pool_unavailable")
        await until(lambda: [parent.left for parent in one.pool.state.parents.values()] == [0])


async def test_an_unreachable_pool_is_reported_without_its_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(*_: Any) -> Any:
        raise PoolUnavailable("connecting to /secret/redis.sock")

    async with rig(schedules=False) as one:
        monkeypatch.setattr(one.pool, "submit", away)
        status, error = await one.error(COMPLETIONS, prompt="a")
        assert (status, error["message"]) == (503, "the request pool does not answer")
        assert "/secret/redis.sock" in caplog.text
