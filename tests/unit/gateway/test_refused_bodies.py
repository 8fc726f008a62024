"""Bodies that are no JSON that a call could be read from: status, words, and the connection's end."""

from typing import Any

import pytest

from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import error_of, rig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x": ' + b"[" * 40 + b"]" * 40 + b', "prompt": "a"}',
        b'{"prompt": "a", "chat_template_kwargs": ' + b'{"a":' * 500 + b"1" + b"}" * 501,
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_a_body_that_is_no_valid_json_object_is_400(body: bytes) -> None:
    async with rig(schedules=False) as one:
        status, error = error_of(await one.client.post(COMPLETIONS, content=body, headers=JSON))
        assert (status, error["code"]) == (400, "invalid_json")


async def test_a_body_that_is_too_large_is_413_with_or_without_content_length() -> None:
    async def unannounced() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with rig(schedules=False, settings=GatewaySettings(model="tiny", body_bytes_max=1000)) as one:
        for content in (b" " * 1001, unannounced()):
            response = await one.client.post(COMPLETIONS, content=content, headers=JSON)
            status, error = error_of(response)
            assert (status, error["code"]) == (413, "body_too_large")
            assert response.headers["connection"] == "close"


@pytest.mark.parametrize("kind", [None, "text/plain", "text/plain; application/json", "multipart/form-data", "json"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_content_types_that_a_web_page_can_send_across_origins_are_415(path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    async with rig(schedules=False) as one:
        response = await one.client.post(path, content=b'{"prompt": "a"}', headers=headers)
        status, error = error_of(response)
        assert (status, error["code"], error["param"]) == (415, "unsupported_media_type", "Content-Type")
        assert error["message"].startswith("Content-Type: must be application/json, not ")
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
async def test_every_json_content_type_is_accepted(kind: str) -> None:
    async with rig() as one:
        response = await one.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind})
        assert response.status_code == 200


async def test_a_compressed_body_is_415_and_its_header_is_named() -> None:
    async with rig(schedules=False) as one:
        headers = {**JSON, "content-encoding": "gzip"}
        status, error = error_of(await one.client.post(COMPLETIONS, content=b"\x1f\x8b", headers=headers))
        assert (status, error["param"]) == (415, "Content-Encoding")
        assert error["message"].startswith("Content-Encoding: must be identity, not 'gzip'")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_a_number_that_json_does_not_define_is_named(number: str) -> None:
    async with rig(schedules=False) as one:
        content = f'{{"prompt": "a", "top_p": {number}}}'
        _, error = error_of(await one.client.post(COMPLETIONS, content=content, headers=JSON))
        assert f"it has {number.removeprefix('-')}, which is not JSON, at line 1 column" in error["message"]


WRONG_VALUES = [
    (b'"max_tokens": 1e400', None, "number is infinity"),
    (b'"seed": -' + b"9" * 400, None, "number is infinity"),
    (b'"seed": 1e300', "seed", "seed: is too large a number"),
    (b'"temperature": 1e300', "temperature", "temperature: must be at most 2"),
    (b'"temperature": true', "temperature", "temperature: must be a number"),
    (b'"n": true', "n", "n: must be a whole number"),
    (b'"n": 1.5', "n", "n: must be a whole number"),
    (b'"logprobs": false', "logprobs", "logprobs: must be a whole number"),
    (b'"logit_bias": {"5": true}', "logit_bias.5", "logit_bias.5: must be a number"),
    (b'"logit_bias": {"5": 1, "5": 2}', "5", "5: occurs twice in one object"),
    (b'"logit_bias": {"5": 1, "\\u0035": 2}', "5", "5: occurs twice in one object"),
    (b'"prompt": "b"', "prompt", "prompt: occurs twice in one object"),
    (b'"stop_token_ids": [true]', "stop_token_ids[0]", "stop_token_ids[0]: must be a whole number"),
    (b'"stream": 1', "stream", "stream: must be true or false"),
    (b'"user": "\xc3\x28"', None, "the body is not valid UTF-8, which JSON must be, at byte 26"),
    (b'"user": "\xff\xfe"', None, "the body is not valid UTF-8, which JSON must be, at byte 26"),
    (b'"user": "\x00"', None, "the body is not valid JSON"),
    (b'"user": 0x10', None, "the body is not valid JSON"),
    (b'"user": 007', None, "the body is not valid JSON"),
]


@pytest.mark.parametrize(("member", "param", "words"), WRONG_VALUES, ids=[repr(row[0][:40]) for row in WRONG_VALUES])
async def test_json_that_parsers_read_differently_is_400_with_a_reason(
    member: bytes, param: str | None, words: str
) -> None:
    async with rig(schedules=False) as one:
        content = b'{"prompt": "a", ' + member + b"}"
        status, error = error_of(await one.client.post(COMPLETIONS, content=content, headers=JSON))
        assert (status, error["param"]) == (400, param)
        assert words in error["message"]
        assert (await one.pool.stats()).queued == 0


async def test_a_byte_order_mark_is_named() -> None:
    async with rig(schedules=False) as one:
        _, error = error_of(await one.client.post(COMPLETIONS, content=b"\xef\xbb\xbf{}", headers=JSON))
        assert "byte order mark" in error["message"]


async def test_an_empty_body_is_named() -> None:
    async with rig(schedules=False) as one:
        _, error = error_of(await one.client.post(COMPLETIONS, content=b"", headers=JSON))
        assert error["message"] == "the body is empty: it must be a JSON object"
