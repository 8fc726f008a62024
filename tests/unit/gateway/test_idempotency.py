"""A call that is repeated under its key is one generation, and never that of another call."""

import asyncio
from typing import Any

import httpx
import pytest

from orca.core.domain.errors import QueueFull
from orca.core.domain.request import Request
from orca.gateway.settings import GatewaySettings
from orca.pool.records import OnDisconnect
from orca.pool.settings import PoolSettings
from support.gateway.gateway_rig import WORDS, Rig, error_of, events, recording, rig, until

BODY = {"prompt": "the fox", "max_tokens": 50}


async def keyed(one: Rig, key: str = "k", path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return await one.client.post(path, json=BODY | body, headers={"idempotency-key": key})


async def test_three_posts_at_two_gateways_are_one_generation_and_each_gets_all_of_it() -> None:
    found: list[Request] = []
    async with rig() as one, rig(pool=one.pool, schedules=False) as two:
        one.scheduler.answer = recording(found, WORDS)
        responses = await asyncio.gather(*(keyed(gateway, stream=True) for gateway in (one, two, two)))
        assert len({response.text for response in responses}) == 1
        assert {data for _, data in events(responses[0].text) if data == "[DONE]"}
        assert [response.status_code for response in responses] == [200] * 3
        assert len({response.headers["x-request-id"] for response in responses}) == 1
        assert len(found) == 1


async def test_a_repeated_call_at_another_gateway_gets_the_same_bytes_from_the_first_event() -> None:
    async with rig() as one, rig(pool=one.pool, schedules=False) as two:
        first = await keyed(one)
        assert (await keyed(two)).content == first.content
        assert (await one.pool.stats()).ended == 1


async def test_a_repeated_call_decides_itself_whether_it_gets_event_ids() -> None:
    async with rig() as one:
        await keyed(one, stream=True)
        headers = {"idempotency-key": "k", "accept": "text/event-stream"}
        response = await one.client.post("/v1/completions", json=BODY | {"stream": True}, headers=headers)
        assert [event_id for event_id, _ in events(response.text)][:2] == ["0.0", "0.1"]


async def test_a_repeated_call_joins_the_first_while_it_runs() -> None:
    async with rig() as one:
        one.scheduler.turns_left = 3
        posting = [asyncio.create_task(keyed(one))]
        await until(lambda: [record for record in one.pool.state.records.values() if len(record.log) == 3])
        posting.append(asyncio.create_task(keyed(one)))
        await until(lambda: [len(parent.readers) for parent in one.pool.state.parents.values()] == [2])
        one.scheduler.turns_left = None
        one.scheduler.may_run.set()
        assert len({(await response).content for response in posting}) == 1


@pytest.mark.parametrize("change", [{"prompt": "the dog"}, {"seed": 1}, {"stream": True}, {"user": "else"}], ids=str)
async def test_the_same_key_with_another_body_is_refused(change: dict[str, Any]) -> None:
    async with rig() as one:
        await keyed(one)
        status, error = error_of(await keyed(one, **change))
        assert (status, error["code"], error["param"]) == (422, "idempotency_key_reused", "Idempotency-Key")


async def test_the_same_key_at_another_endpoint_is_refused() -> None:
    async with rig() as one:
        await keyed(one, messages=[{"role": "user", "content": "hi"}])
        response = await keyed(one, path="/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        assert response.status_code == 422


async def test_the_order_of_fields_and_null_for_a_default_are_the_same_body() -> None:
    async with rig() as one:
        first = await keyed(one, temperature=1)
        body = {"n": None, "temperature": 1.0, "max_tokens": 50, "prompt": "the fox"}
        again = await one.client.post("/v1/completions", json=body, headers={"idempotency-key": "k"})
        assert again.content == first.content


async def test_calls_with_other_keys_or_none_are_separate_generations() -> None:
    async with rig() as one:
        names = [(await keyed(one, key)).json()["id"] for key in ("a", "b", "a")]
        names += [(await one.complete())["id"], (await one.complete())["id"]]
        assert len(set(names)) == 4
        assert names[0] == names[2]


async def test_the_same_idempotency_key_under_two_api_keys_is_two_generations() -> None:
    async with rig(settings=GatewaySettings(model="tiny", api_keys=("secret-1", "secret-2"))) as one:
        names = set()
        for api_key in ("secret-1", "secret-2", "secret-1"):
            headers = {"idempotency-key": "k", "authorization": f"Bearer {api_key}"}
            names.add((await one.client.post("/v1/completions", json=BODY, headers=headers)).json()["id"])
        assert len(names) == 2
        assert not any("secret" in str(parent) for parent in one.pool.state.parents.values())


@pytest.mark.parametrize("keys", [[""], ["x" * 256], ["tab\there"], ["é"], ["one", "another"]])
async def test_a_repeated_unprintable_or_long_idempotency_key_is_refused(keys: list[str]) -> None:
    async with rig() as one:
        headers = [(b"idempotency-key", key.encode("latin-1")) for key in keys]
        status, error = error_of(await one.client.post("/v1/completions", json=BODY, headers=headers))
        assert (status, error["code"], error["param"]) == (400, "invalid_idempotency_key", "Idempotency-Key")


@pytest.mark.parametrize(
    ("body", "headers", "kept"),
    [
        ({}, {}, OnDisconnect.CANCEL),
        ({"on_disconnect": "keep"}, {}, OnDisconnect.KEEP),
        ({}, {"idempotency-key": "k"}, OnDisconnect.KEEP),
        ({"on_disconnect": "cancel"}, {"idempotency-key": "k"}, OnDisconnect.CANCEL),
        ({"background": True}, {}, OnDisconnect.KEEP),
    ],
    ids=str,
)
async def test_the_effect_of_a_disconnect_follows_from_the_body_and_the_key(
    body: dict[str, Any], headers: dict[str, str], kept: OnDisconnect
) -> None:
    async with rig() as one:
        response = await one.client.post("/v1/completions", json=BODY | body, headers=headers)
        assert one.pool.state.parents[response.headers["x-request-id"]].submission.on_disconnect is kept


async def test_a_refused_call_may_be_sent_again_under_its_key() -> None:
    async with rig(pool_settings=PoolSettings(max_queued=1)) as one:
        assert (await keyed(one, n=2)).status_code == 429
        assert (await keyed(one, n=1)).status_code == 200


async def test_a_full_queue_refuses_new_calls_but_not_repetitions_of_accepted_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(_: int | None) -> None:
        raise QueueFull("full")

    async with rig() as one:
        first = await keyed(one, deadline_ms=60_000)
        monkeypatch.setattr(one.app.state.gateway.overload, "check", full)
        assert (await keyed(one, "new")).status_code == 429
        assert (await keyed(one, deadline_ms=60_000)).content == first.content
