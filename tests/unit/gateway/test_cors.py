"""Calls from web pages of other origins: which pages may make them, and what a browser lets the page read."""

import logging
from pathlib import Path

import httpx
import pytest

from orca.core.api_keys import ApiKey, KeyLimits, key_digest, key_line
from orca.core.domain.errors import SettingError
from orca.gateway.http.cors import EXPOSED_HEADERS
from orca.gateway.settings import GatewaySettings, parse_settings
from support.gateway.gateway_rig import Rig, rig

PAGE, OTHER = "http://localhost:5173", "https://evil.example"
SETTINGS = GatewaySettings(model="tiny", cors_origins=("https://chat.example.com", PAGE))
ANY = GatewaySettings(model="tiny", cors_origins=("*",))
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


async def preflight(one: Rig, origin: str = PAGE, path: str = CHAT, **more: str) -> httpx.Response:
    asked = "authorization,content-type,idempotency-key,x-stainless-lang"
    headers = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": asked}
    return await one.client.options(path, headers=headers | more)


def cors_headers(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


def words(text: str) -> set[str]:
    return set(text.split(", "))


async def test_without_origins_nothing_is_allowed() -> None:
    async with rig(schedules=False) as one:
        response = await preflight(one)
        assert (response.status_code, cors_headers(response)) == (405, {})
        response = await one.client.get("/v1/models", headers={"origin": PAGE})
        assert (response.status_code, cors_headers(response), "vary" in response.headers) == (200, {}, False)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/models", "/v1/requests/x", "/nowhere"])
@pytest.mark.parametrize(("settings", "allowed"), [(SETTINGS, PAGE), (ANY, "*")], ids=["list", "any"])
async def test_a_preflight_is_answered_without_a_key(settings: GatewaySettings, allowed: str, path: str) -> None:
    keyed = GatewaySettings(model="tiny", cors_origins=settings.cors_origins, api_keys=("k",))
    async with rig(schedules=False, settings=keyed) as one:
        response = await preflight(one, path=path)
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-origin"] == allowed
        assert words(response.headers["access-control-allow-methods"]) == {"GET", "HEAD", "POST", "DELETE"}
        assert words(response.headers["access-control-allow-headers"]) >= {
            "authorization", "content-type", "idempotency-key", "last-event-id", "x-stainless-lang"
        }  # fmt: skip
        assert int(response.headers["access-control-max-age"]) > 0
        assert response.headers.get("vary") == ("Origin" if allowed == PAGE else None)
        assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize("origin", [OTHER, "null", "http://localhost:5174", "https://localhost:5173", f"{PAGE}.evil"])
async def test_another_origin_gets_no_header_and_its_preflight_no_answer(origin: str) -> None:
    async with rig(schedules=False, settings=SETTINGS) as one:
        response = await preflight(one, origin)
        assert (response.status_code, cors_headers(response), response.headers["vary"]) == (405, {}, "Origin")
        response = await one.client.get("/v1/models", headers={"origin": origin})
        assert (response.status_code, cors_headers(response), response.headers["vary"]) == (200, {}, "Origin")


async def test_a_page_reads_answers_streams_and_errors_with_their_headers(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(key_line(ApiKey("alice", key_digest("a"), KeyLimits(requests_per_minute=3))) + "\n")
    settings = GatewaySettings(model="tiny", cors_origins=(PAGE,), api_keys_file=str(file))
    async with rig(settings=settings) as one:
        keyed = {"origin": PAGE, "authorization": "Bearer a"}
        answers = [
            await one.client.post(CHAT, json=BODY, headers=keyed),
            await one.client.post(CHAT, json=BODY | {"stream": True}, headers=keyed),
            await one.client.post(CHAT, json=BODY | {"background": True}, headers=keyed),
            await one.client.post(CHAT, json=BODY, headers=keyed),
            await one.client.post(CHAT, json=BODY, headers={"origin": PAGE}),
            await one.client.get("/nowhere", headers=keyed),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 202, 429, 401, 404]
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert words(answer.headers["access-control-expose-headers"]) == set(EXPOSED_HEADERS)
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-requests", "location"} <= set(EXPOSED_HEADERS)
        # Whatever the API adds to an answer can be read.
        simple = {"content-type", "content-length", "cache-control", "www-authenticate", "vary", "x-accel-buffering"}
        shown = {name for answer in answers for name in answer.headers if not name.startswith("access-control-")}
        assert shown - simple <= set(EXPOSED_HEADERS)


async def test_a_bug_of_the_gateway_can_be_read_by_the_page_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(schedules=False, settings=SETTINGS) as one:
        monkeypatch.setattr(one.app.state.gateway.models, "check_name", lambda _: 1 // 0)
        response = await one.client.post(CHAT, json=BODY, headers={"origin": PAGE})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (500, PAGE)


async def test_a_page_of_the_internet_may_call_a_private_network_if_its_origin_is_allowed() -> None:
    async with rig(schedules=False, settings=SETTINGS) as one:
        asked = {"access-control-request-private-network": "true"}
        assert (await preflight(one, **asked)).headers["access-control-allow-private-network"] == "true"
        assert "access-control-allow-private-network" not in (await preflight(one)).headers
        assert cors_headers(await preflight(one, OTHER, **asked)) == {}


async def test_a_header_name_that_is_none_is_not_repeated() -> None:
    async with rig(schedules=False, settings=ANY) as one:
        asked = {"access-control-request-headers": "x-a, b c, <d>, "}
        allowed = words((await preflight(one, **asked)).headers["access-control-allow-headers"])
        assert "x-a" in allowed
        assert not {"b c", "<d>", ""} & allowed


@pytest.mark.parametrize(
    ("given", "sent"),
    [("https://Chat.Example.com:443", "https://chat.example.com"), ("http://[::1]:80", "http://[::1]"),
     ("app://obsidian.md", "app://obsidian.md"), ("http://a:8080", "http://a:8080")],
)  # fmt: skip
async def test_an_origin_is_compared_as_browsers_write_it(given: str, sent: str) -> None:
    async with rig(schedules=False, settings=GatewaySettings(model="tiny", cors_origins=(given,))) as one:
        assert (await preflight(one, sent)).headers["access-control-allow-origin"] == sent


BAD = (
    "chat.example.com",
    "https://a.example/",
    "https://a.example/x",
    "https://*.example",
    "null",
    "https://u@a",
    "**",
    "https://bücher.example",  # a browser sends https://xn--bcher-kva.example
    "https://a;b",
    "https://a.example%20",
    "https://a.example:99999",
)


@pytest.mark.parametrize("origin", BAD)
def test_a_setting_that_is_no_origin_stops_the_start(origin: str) -> None:
    with pytest.raises(SettingError, match="--cors-origins"):
        parse_settings(["--model", "m", "--cors-origins", f"https://ok.example,{origin}"], {})


def test_origins_are_read_from_flag_and_variable() -> None:
    expected = ("https://a.example", "http://b:1")
    text = "https://a.example, http://b:1"
    assert parse_settings(["--model", "m", "--cors-origins", text], {}).cors_origins == expected
    assert parse_settings(["--model", "m"], {"ORCA_GATEWAY_CORS_ORIGINS": text}).cors_origins == expected
    assert parse_settings(["--model", "m"], {}).cors_origins == ()


async def test_an_open_api_that_every_page_may_call_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def warned() -> bool:
        return any("every web page" in record.message for record in caplog.records)

    with caplog.at_level(logging.WARNING):
        async with rig(schedules=False, settings=SETTINGS):
            assert not warned()
        async with rig(schedules=False, settings=ANY):
            assert warned()
