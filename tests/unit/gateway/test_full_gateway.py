"""A gateway whose pool or loop is full: what a call that is refused costs, and who is told what."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

from orca.core.api_keys import ApiKey, KeyLimits, key_digest, key_line
from orca.core.domain.request import Request
from orca.gateway.limits.backlog import POLL_SECONDS
from orca.gateway.limits.overload import LAG_MOST_SECONDS
from orca.gateway.settings import GatewaySettings
from orca.pool.records import Parent, Submission
from orca.pool.settings import PoolSettings
from support.gateway.gateway_rig import Rig, error_of, recording, rig, until
from support.gateway.scripted_pool import ScriptedPool, stats

COMPLETIONS = "/v1/completions"


async def filled(one: Rig, calls: int) -> list[asyncio.Task[Any]]:
    """Submit that many calls, which wait in the pool."""
    tasks = [asyncio.create_task(one.post(COMPLETIONS, prompt="a", max_tokens=2)) for _ in range(calls)]
    await until(lambda: len(one.pool.state.parents) == calls)
    return tasks


async def test_refused_calls_read_no_body_and_cost_no_tokens_and_no_iteration() -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was asked for")
        yield b""

    ran: list[Request] = []
    async with rig(schedules=False, pool_settings=PoolSettings(max_queued=2)) as one:
        waiting = await filled(one, 2)
        await one.error(COMPLETIONS, prompt="a")
        for _ in range(20):
            refused = await one.client.post(COMPLETIONS, content=unread(), headers={"content-type": "application/json"})
            status, error = error_of(refused)
            assert (status, error["code"]) == (429, "queue_full")
            assert 1 <= int(refused.headers["retry-after-ms"]) / 1000 <= int(refused.headers["retry-after"]) <= 60
        one.scheduler.answer = recording(ran)
        scheduling = asyncio.create_task(one.scheduler.run())
        assert {(await task).status_code for task in waiting} == {200}
        assert len(ran) == len(waiting)
        scheduling.cancel()


class SilentWhenFull(ScriptedPool):
    """Says that it is full and must not be asked anything else for a new call."""

    def __init__(self) -> None:
        super().__init__(stats(queued=100))

    async def submit(self, submission: Submission) -> tuple[Request, ...]:  # noqa: ARG002 - the pool's signature
        raise AssertionError("a call was submitted")

    async def parent(self, parent: str) -> Parent:  # noqa: ARG002 - likewise
        raise AssertionError("a call was looked up")


async def test_refused_calls_share_one_call_to_the_pool() -> None:
    pool = SilentWhenFull()
    async with rig(schedules=False, pool=pool) as one:
        started, before = time.monotonic(), pool.asked
        for _ in range(50):
            assert (await one.error(COMPLETIONS, prompt="a"))[0] == 429
        assert pool.asked - before <= 1 + (time.monotonic() - started) / POLL_SECONDS


async def test_a_wrong_key_is_401_even_if_the_queue_is_full() -> None:
    settings = GatewaySettings(model="tiny", api_keys=("right",))
    async with rig(schedules=False, pool=SilentWhenFull(), settings=settings) as one:
        answers = [
            await one.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"})
            for key in ("wrong", "right")
        ]
        assert [answer.status_code for answer in answers] == [401, 429]


async def test_new_calls_leave_connections_for_resuming_and_cancelling() -> None:
    async with rig(schedules=False, settings=GatewaySettings(model="tiny", connections_max=3)) as one:
        waiting = await filled(one, 2)
        keyed = {"idempotency-key": "k"}
        waiting.append(asyncio.create_task(one.client.post(COMPLETIONS, json={"prompt": "a"}, headers=keyed)))
        await until(lambda: one.app.state.gateway.drain.open_answers == 3)
        status, error = await one.error(COMPLETIONS, prompt="a")
        assert (status, error["code"]) == (503, "too_many_answers")
        repeated = await one.client.post(COMPLETIONS, json={"prompt": "b"}, headers=keyed)
        assert repeated.status_code == 422
        for parent in list(one.pool.state.parents):
            assert (await one.client.delete(f"/v1/requests/{parent}")).status_code == 200
        await asyncio.gather(*waiting)


async def test_a_refusal_by_the_pool_is_remembered() -> None:
    async with rig(schedules=False, pool_settings=PoolSettings(max_queued=2)) as one:
        tasks = await filled(one, 2)
        for _ in range(3):
            status, error = await one.error(COMPLETIONS, prompt="a")
            assert (status, error["code"]) == (429, "queue_full")
        for task in tasks:
            task.cancel()


async def test_a_key_of_lower_priority_is_refused_in_a_queue_that_others_may_fill(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    keys = [ApiKey("batch", key_digest("b"), KeyLimits(queue_percent=50)), ApiKey("people", key_digest("p"))]
    file.write_text("\n".join(map(key_line, keys)))
    settings = GatewaySettings(model="tiny", api_keys_file=str(file))
    async with rig(schedules=False, settings=settings, pool=ScriptedPool(stats(queued=60))) as one:
        answers = [
            await one.client.post(COMPLETIONS, json={"prompt": 5}, headers={"authorization": f"Bearer {key}"})
            for key in ("b", "p")
        ]
        assert [error_of(answer)[0] for answer in answers] == [429, 400]


async def test_a_lagging_event_loop_takes_no_new_calls_until_it_recovers() -> None:
    async with rig(schedules=False) as one:
        lag = one.app.state.gateway.overload.lag
        lag.most_seconds = LAG_MOST_SECONDS
        time.sleep(2 * LAG_MOST_SECONDS)  # noqa: ASYNC251 - nothing else is to have its turn
        await until(lambda: lag.seconds > LAG_MOST_SECONDS)
        refused = await one.client.post(COMPLETIONS, json={"prompt": "a"})
        assert (refused.status_code, error_of(refused)[1]["code"]) == (503, "gateway_busy")
        assert 1 <= int(refused.headers["retry-after-ms"]) / 1000 <= 2
        await until(lambda: lag.seconds < LAG_MOST_SECONDS)
        [call] = await filled(one, 1)
        call.cancel()


async def test_a_refused_call_is_counted_by_path_and_against_the_limits_of_its_key(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text(key_line(ApiKey("one", key_digest("k"), KeyLimits(requests_per_minute=1))))
    settings = GatewaySettings(model="tiny", api_keys_file=str(file))
    async with rig(schedules=False, settings=settings, pool=ScriptedPool(stats(queued=100))) as one:
        keyed = {"authorization": "Bearer k"}
        # The first one asks the pool, behind the router; from the second on the queue is known to be full.
        first, second = [await one.client.post(COMPLETIONS, json={"prompt": "a"}, headers=keyed) for _ in range(2)]
        assert [error_of(answer)[1]["code"] for answer in (first, second)] == ["queue_full", "rate_limit_exceeded"]
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        metrics = (await one.client.get("/metrics")).text
        assert re.search(r'orca_http_requests_total\{[^}]*route="/v1/completions"[^}]*status="429"[^}]*\} 2', metrics)
