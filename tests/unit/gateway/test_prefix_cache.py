"""The prefix cache as a client sees it: the salt of a call, and the cached tokens of its usage."""

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orca.core.api_keys import ApiKey, KeyLimits, key_digest, key_line
from orca.core.domain.errors import SettingError
from orca.core.domain.request import Request
from orca.gateway.answer.tracing import Tracing
from orca.gateway.settings import GatewaySettings, parse_settings
from support.gateway.gateway_rig import Rig, error_of, events, recording, rig

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PATHS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHATS: {"messages": [{"role": "user", "content": "hello"}]},
    RESPONSES: {"input": "hello"},
}


KEYS = ("secret-one", "secret-two")


async def salts(one: Rig, path: str = COMPLETIONS, *, key: str | None = None, **fields: Any) -> list[str | None]:
    """Make a call. Returns: the salts of its requests. Args: key: the API key."""
    found: list[Request] = []
    one.scheduler.answer = recording(found)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await one.client.post(path, json=PATHS[path] | fields, headers=headers)
    assert response.status_code == 200, response.text
    return [request.cache_salt for request in found]


def with_keys(folder: Path, **settings: Any) -> GatewaySettings:
    """Write a file with the API keys of KEYS. Returns: the settings of a gateway that reads it."""
    file = folder / "keys"
    lines = [key_line(ApiKey(name, key_digest(name), KeyLimits())) for name in KEYS]
    file.write_text("\n".join(lines) + "\n")
    return GatewaySettings(model="tiny", api_keys_file=str(file), **settings)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "salt"), [({}, None), ({"cache_salt": None}, None), ({"cache_salt": "a b"}, "a b")])
async def test_the_salt_of_a_call_is_stored(one: Rig, path: str, fields: dict[str, Any], salt: str | None) -> None:
    assert await salts(one, path, **fields) == [salt]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("salt", ["", "x" * 257, 7, ["a"]], ids=["empty", "long", "number", "list"])
async def test_a_salt_that_is_no_short_text_is_refused(one: Rig, path: str, salt: Any) -> None:
    status, error = await one.error(path, **PATHS[path], cache_salt=salt)
    assert (status, error["param"]) == (400, "cache_salt")


async def test_with_sharing_by_key_each_key_has_salts_of_its_own(tmp_path: Path) -> None:
    async with rig(settings=with_keys(tmp_path, prefix_sharing="key")) as one:
        found = [await salts(one, key=key, cache_salt=salt) for key in KEYS for salt in (None, "a")]
        assert len({salt for [salt] in found}) == 4
        assert None not in [salt for [salt] in found]
        assert await salts(one, key=KEYS[0], cache_salt="a") == found[1]
        assert not any("secret" in str(salt) for [salt] in found), "the key itself is not stored"


async def test_without_keys_all_share(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with rig(settings=GatewaySettings(model="tiny", prefix_sharing="key")) as alone:
        assert await salts(alone) == [None]
        assert await salts(alone, cache_salt="a") == ["a"]
    assert caplog.text.count("--prefix-sharing key has no effect") == 1


def test_other_ways_to_share_are_refused() -> None:
    with pytest.raises(SettingError, match="prefix-sharing"):
        parse_settings(["--model", "m", "--prefix-sharing", "some"], {})


async def test_a_salt_is_refused_by_name_while_no_record_can_have_it(one: Rig) -> None:
    await one.pool.set_schema(2)
    status, error = error_of(await one.post(COMPLETIONS, prompt="hello", cache_salt="a"))
    assert (status, error["param"]) == (400, "cache_salt")
    assert "schema 2" in error["message"]


@pytest.mark.parametrize("more", [{}, {"priority": 1}], ids=["plain", "with another newer field"])
async def test_sharing_by_key_shares_nothing_while_no_record_can_have_a_salt(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    async with rig(settings=with_keys(tmp_path, prefix_sharing="key")) as one:
        await one.pool.set_schema(2)
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        status, error = error_of(await one.client.post(COMPLETIONS, json=PATHS[COMPLETIONS] | more, headers=headers))
        assert (status, error["code"], error["param"]) == (503, "newer_schema_needed", None)
        assert "--prefix-sharing key" in error["message"]


async def test_usage_has_the_prompt_tokens_that_were_not_computed(one: Rig) -> None:
    assert "prompt_tokens_details" not in (await one.complete())["usage"]
    one.scheduler.cached = lambda _: 16
    assert (await one.complete())["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert (await one.chat())["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    response = (await one.post(RESPONSES, input="hello")).json()
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 16}


async def test_a_prompt_with_choices_counts_as_its_first_one_found_it(one: Rig) -> None:
    one.scheduler.cached = lambda request: [0, 64, 16, 64][request.choice]
    answer = await one.complete(prompt=["the fox", "a"], n=2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
async def test_a_stream_has_the_same_usage_also_when_it_is_resumed(one: Rig, options: dict[str, bool]) -> None:
    one.scheduler.cached = lambda _: 16
    body = {"prompt": "the fox", "max_tokens": 50, "stream": True, "stream_options": options}
    headers = {"idempotency-key": "k", "accept": "text/event-stream"}
    whole = list(events((await one.client.post(COMPLETIONS, json=body, headers=headers)).text))
    usage = [data["usage"] for _, data in whole if data != "[DONE]" and data.get("usage")]
    assert usage[-1]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert all(each["prompt_tokens_details"] == {"cached_tokens": 16} for each in usage)
    rest = await one.client.post(COMPLETIONS, json=body, headers={**headers, "last-event-id": "0.1"})
    assert list(events(rest.text))[-2:] == whole[-2:]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_has_the_cached_tokens_of_the_usage(stream: bool) -> None:
    exporter = InMemorySpanExporter()
    async with rig(tracing=Tracing(exporter)) as one:
        await one.complete()
        one.scheduler.cached = lambda request: [0, 64, 16, 64][request.choice]
        assert (await one.post(COMPLETIONS, prompt=["the fox", "a"], n=2, stream=stream)).status_code == 200
    calls = [span.attributes or {} for span in exporter.get_finished_spans() if span.name == f"POST {COMPLETIONS}"]
    assert [call.get("gen_ai.usage.cache_read.input_tokens") for call in calls] == [None, 16]


async def test_no_span_has_a_salt(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with rig(settings=with_keys(tmp_path, prefix_sharing="key"), tracing=Tracing(exporter)) as one:
        stored = [await salts(one, path, key=KEYS[0], cache_salt="tenant-7") for path in PATHS]
        await one.pool.set_schema(2)
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        refused = await one.client.post(
            COMPLETIONS, json=PATHS[COMPLETIONS] | {"cache_salt": "tenant-7"}, headers=headers
        )
        assert refused.status_code in (400, 503)
    spans = [span.to_json() for span in exporter.get_finished_spans()]
    assert len(spans) > 3 * len(PATHS)
    assert all(salt is not None for [salt] in stored)
    hidden = {"tenant-7", *KEYS, *(json.dumps(salt)[1:-1] for [salt] in stored)}
    assert not [span for span in spans if any(each in span for each in hidden)]
