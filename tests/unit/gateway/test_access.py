"""Every route of the table is protected as it says, also against known ways around it."""

import asyncio
import itertools

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from orca.gateway.limits.auth import OPEN_PATHS
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import error_of, rig, until
from support.gateway.gateway_server import LIMIT_SECONDS, served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


KEYED = GatewaySettings(model="tiny", api_keys=("right", "also"))
WRONG_KEYS = [None, "Bearer wrong", "Bearer ", "Basic right", "right", "Bearer rightx", "Bearer right x", "Bearer é"]


def calls(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of everything that the application's own table of routes has."""
    return [
        (method, (route.path or "").replace("{name:path}", "tiny"))
        for route in iter_route_contexts(app.routes)
        for method in sorted(route.methods or ())
    ]


@pytest.mark.parametrize("key", WRONG_KEYS)
async def test_without_a_valid_key_only_the_open_routes_are_served(key: str | None) -> None:
    headers = {} if key is None else {"authorization": key.encode()}
    async with rig(schedules=False, settings=KEYED) as one:
        table = calls(one.app)
        assert {path for _, path in table} > OPEN_PATHS
        for method, path in table:
            response = await one.client.request(method, path, headers=headers)
            if path in OPEN_PATHS:
                # Without a group, /ready has its 503 for all.
                assert response.status_code in (200, 503), path
                continue
            status, error = error_of(response)
            assert (status, error["code"]) == (401, "invalid_api_key"), path
            # Programs match on these words of OpenAI's.
            missing, wrong = "You didn't provide an API key", "Incorrect API key provided"
            assert error["message"].startswith(wrong if "authorization" in response.request.headers else missing)
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("host", ["orca", "/health", "127.0.0.1", "localhost:1", "a.b@/health", "orca/health", ""])
async def test_head_and_an_unusual_host_header_open_no_route(host: str) -> None:
    headers = {"host": host, "x-forwarded-host": "127.0.0.1", "x-original-url": "/health", "x-rewrite-url": "/health"}
    async with rig(schedules=False, settings=KEYED) as one:
        for method, path in calls(one.app):
            if path not in OPEN_PATHS:
                assert (await one.client.request(method, path, headers=headers)).status_code == 401, path
                head = await one.client.head(path, headers=headers)
                # Where there is no GET, there is no HEAD.
                assert (head.status_code, head.content) == (401 if method == "GET" else head.status_code, b""), path
                assert head.status_code in (401, 405), path


METHODS = ["GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE"]
PATHS = ["/v1/models", "/v1/completions", "/v1/%63ompletions", "/v1%2ecompletions", "/v1/./completions"]
TRICKS = ["/{}", "{}/", "/.{}", "/x/..{}", "{}?key=right", "{};x", "{}%00", "{}%2f", "{}#", "http://orca{}"]


@pytest.mark.parametrize("trick", TRICKS)
async def test_no_path_spelling_and_no_method_bypasses_the_key(trick: str) -> None:
    """Real sockets are used, because clients would normalise these paths."""
    settings = GatewaySettings(model="tiny", port=0, drain_seconds=1, api_keys=("right",))
    async with served(settings, schedules=False) as one:
        for method, path in itertools.product(METHODS, PATHS):
            lines = [f"{method} {trick.format(path)} HTTP/1.1", "host: /health", "x-forwarded-host: 127.0.0.1"]
            lines += ["x-original-url: /health", "x-forwarded-prefix: /health", "connection: close", "", ""]
            reader, _ = await one.open("\r\n".join(lines).encode())
            answer = await asyncio.wait_for(reader.read(), LIMIT_SECONDS)
            assert int(answer.split()[1]) in (400, 401, 404, 405), (path, answer)
            assert b"tiny" not in answer


async def test_a_key_has_a_bound_of_concurrent_calls_until_their_answers_end() -> None:
    settings = GatewaySettings(model="tiny", port=0, drain_seconds=1, api_keys=("right", "also"), calls_per_key_max=1)
    async with served(settings) as one, httpx.AsyncClient(base_url=one.url) as client:
        one.rig.scheduler.turns_left = 1
        body = {"prompt": "a", "max_tokens": 5, "stream": True}
        right, also = ({"authorization": f"Bearer {key}"} for key in settings.api_keys)
        async with client.stream("POST", COMPLETIONS, json=body, headers=right) as response:
            await until(lambda: any(record.log for record in one.rig.pool.state.records.values()))
            refused = await client.post("/tokenize", json={"prompt": "a"}, headers=right)
            assert error_of(refused)[1]["code"] == "too_many_calls"
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await client.post("/tokenize", json={"prompt": "a"}, headers=also)).status_code == 200
            one.rig.scheduler.turns_left = None
            one.rig.scheduler.may_run.set()
            await response.aread()
        assert (await client.post("/tokenize", json={"prompt": "a"}, headers=right)).status_code == 200


async def test_metrics_can_have_a_port_of_their_own() -> None:
    settings = GatewaySettings(model="tiny", port=0, metrics_port=0, drain_seconds=1, api_keys=("right",))
    async with served(settings, schedules=False) as one, httpx.AsyncClient() as client:
        own = f"http://127.0.0.1:{one.server.metrics_port}"
        assert "orca_pool_up" in (await client.get(f"{own}/metrics")).text
        assert error_of(await client.get(f"{one.url}/metrics"))[0] == 404
        assert error_of(await client.get(f"{own}/v1/models"))[0] == 401


async def test_clients_that_fill_the_public_port_do_not_block_probes_of_the_internal_port() -> None:
    settings = GatewaySettings(model="tiny", port=0, metrics_port=0, drain_seconds=1, connections_max=1)
    async with served(settings, schedules=False) as one, httpx.AsyncClient() as first, httpx.AsyncClient() as second:
        assert (await first.get(f"{one.url}/health")).status_code == 200
        assert (await second.get(f"{one.url}/health")).status_code == 503
        assert (await second.get(f"http://127.0.0.1:{one.server.metrics_port}/health")).status_code == 200


async def test_any_of_the_keys_is_accepted_and_probes_need_none() -> None:
    async with rig(settings=GatewaySettings(model="tiny", api_keys=("right", "also"))) as one:
        for key in ("right", "also"):
            response = await one.client.get("/v1/models", headers={"authorization": f"bearer {key}"})
            assert response.status_code == 200
        for path in ("/health", "/metrics", "/"):
            assert (await one.client.get(path)).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
async def test_a_trailing_slash_is_404_and_not_redirected(method: str) -> None:
    async with rig(schedules=False) as one:
        response = await one.client.request(method, COMPLETIONS + "/", headers={"host": "evil"})
        assert response.status_code == 404
        assert "location" not in response.headers
        assert method == "HEAD" or error_of(response)[0] == 404
