"""Keys leave no trace: not in logs, metrics, answers to others or Redis, wherever a client puts them."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from orca.core.api_keys import ApiKey, key_digest, key_line, make_key
from orca.core.process.logs import JsonFormatter
from orca.gateway.answer.tracing import Tracing
from orca.gateway.app import create_app
from orca.gateway.models.models import Models, ServedModel
from orca.gateway.settings import GatewaySettings
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import RedisPool
from support.gateway.gateway_rig import MODEL, FakeScheduler, tokenizer, until
from support.waiting import PATIENT_POOL

RIGHT, SET, WRONG = make_key(), make_key(), make_key()
BODY = {"prompt": "the fox", "max_tokens": 3}


async def call_with_keys_everywhere(client: httpx.AsyncClient) -> list[int]:
    """Calls that are served, refused and broken, with keys where they belong and where they do not."""
    right = {"authorization": f"Bearer {RIGHT}"}
    stray = dict.fromkeys(("x-api-key", "cookie", "traceparent", "x-request-id"), WRONG)
    calls = [
        client.post("/v1/completions", json=BODY, headers=right),
        client.post("/v1/completions", json={**BODY, "stream": True}, headers={"authorization": f"Bearer {SET}"}),
        client.post("/v1/completions", json={**BODY, "api_key": WRONG, "user": RIGHT}, headers={**right, **stray}),
        client.post(f"/v1/completions?api_key={WRONG}", json=BODY, headers=right),
        client.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {WRONG}"}),
        client.post("/v1/completions", json=BODY, headers={"authorization": f"Basic {WRONG}"}),
        client.post("/v1/completions", json={**BODY, "model": WRONG}, headers=right),
        client.post("/v1/completions", json={**BODY, "max_tokens": WRONG}, headers=right),
        client.post("/v1/completions", content=f'{{"{WRONG}', headers={**right, "content-type": "application/json"}),
        client.post("/v1/completions", json=BODY, headers={**right, "content-type": WRONG}),
        client.get(f"/v1/models/{WRONG}", headers=right),
        client.get(f"/{WRONG}", headers=right),
    ]
    return [(await call).status_code for call in calls]


def everything_in(url: str) -> bytes:
    """Names and values of all keys of a Redis, as they are."""
    with redis.Redis.from_url(url) as client:
        client.config_set("rdbcompression", "no")
        names = client.keys("*")
        assert names
        return b"\n".join(part for name in names for part in (name, client.dump(name) or b""))


async def test_no_api_key_appears_in_logs_metrics_or_redis(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "keys"
    file.write_text(key_line(ApiKey("alice", key_digest(RIGHT))))
    settings = GatewaySettings(model="tiny", api_keys=(SET,), api_keys_file=str(file))
    with EmbeddedRedis(tmp_path / "redis") as server:
        pool = RedisPool(server.url, "test", PATIENT_POOL)
        await pool.set_revision(MODEL.revision, 0)
        await pool.promise_slots(MODEL.revision, 1_000)
        app = create_app(pool, Models(ServedModel.of(MODEL, tokenizer(), settings)), settings, tracing=Tracing(None))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://o") as client,
        ):
            await until(lambda: app.state.gateway.models.has_formed)
            with running(FakeScheduler(pool)):
                statuses = await call_with_keys_everywhere(client)
            # A file that holds a key where its hash belongs.
            file.write_text(f"alice: {WRONG}\n{RIGHT}")
            await app.state.gateway.keys.reload()
            metrics = (await client.get("/metrics")).text
        stored = everything_in(server.url)
        await pool.close()
    assert statuses == [200, 200, 200, 200, 401, 401, 404, 400, 400, 415, 404, 404]
    logs = "\n".join(JsonFormatter("gateway").format(record) for record in caplog.records if is_ours(record))
    for place in (logs, metrics, stored.decode("latin-1"), repr(settings), repr(app.state.gateway)):
        for key in (RIGHT, SET, WRONG):
            assert key not in place
            assert key.removeprefix("orca-") not in place
    assert '"key":"alice"' in logs
    assert 'key="alice"' in metrics


@contextlib.contextmanager
def running(scheduler: FakeScheduler) -> Iterator[None]:
    task = asyncio.create_task(scheduler.run())
    yield
    task.cancel()


def is_ours(record: logging.LogRecord) -> bool:
    """The test's own client logs the addresses that it calls."""
    return not record.name.startswith(("httpx", "httpcore"))
