"""Calls as nobody should make them: good ones, each spoilt in one way or two. The same seed draws the same calls.

A call goes to the application as a server would hand it over, so that nothing tidies it up on the way.
"""

import asyncio
import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import httpx
from starlette.types import ASGIApp, Message

from orca.gateway.calls.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from orca.gateway.calls.unsupported_fields import CHAT, COMPLETION
from orca.gateway.responses.bodies import UNSUPPORTED, ResponseBody
from support.gateway.gateway_rig import MODEL

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
SAMPLING = {"max_tokens": 4, "temperature": 0.5, "logit_bias": {"5": 1}, "stop": ["x"], "stop_token_ids": [7]}

GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "the fox", "stream": True, "stream_options": {"include_usage": True}, **SAMPLING},
    CHATS: {
        "messages": MESSAGES,
        "chat_template_kwargs": {"x": 1},
        "logprobs": True,
        "top_logprobs": 1,
        **SAMPLING,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "none",
    },
    RESPONSES: {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the fox"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        ],
        "instructions": "be",
        "stream": True,
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 4,
        "tools": [{"type": "x"}],
        "tool_choice": "auto",
    },
    TOKENIZE: {"messages": MESSAGES, "return_token_strs": True},
    DETOKENIZE: {"tokens": [1, 2, 3]},
}
FIELDS: dict[str, list[str]] = {
    COMPLETIONS: [*CompletionBody.model_fields, *COMPLETION],
    CHATS: [*ChatBody.model_fields, *CHAT],
    RESPONSES: [*ResponseBody.model_fields, *UNSUPPORTED],
    TOKENIZE: [*TokenizeBody.model_fields],
    DETOKENIZE: [*DetokenizeBody.model_fields],
}
INNER: list[tuple[Any, ...]] = [
    ("messages",), ("messages", 0), ("messages", 0, "role"), ("messages", 1, "content"), ("messages", 1, "name"),
    ("messages", 1, "content", 0), ("messages", 1, "content", 0, "type"), ("messages", 1, "content", 0, "text"),
    ("messages", 0, "tool_calls"), ("tools", 0), ("tools", 0, "function"), ("tools", 0, "function", "name"),
    ("tools", 0, "function", "parameters"), ("tool_choice", "function"), ("messages", 0, "tool_calls", 0),
    ("stream_options", "include_usage"), ("stop", 0), ("stop_token_ids", 0),
    ("input", 0), ("input", 0, "type"), ("input", 0, "role"), ("input", 0, "content"), ("input", 0, "content", 0),
    ("input", 0, "content", 0, "text"), ("input", 1, "content"), ("input", 1, "type"), ("text", "format"),
    ("text", "format", "type"), ("text", "format", "schema"), ("reasoning", "effort"),
    ("logit_bias", "5"), ("logit_bias", ""), ("logit_bias", "1e2"), ("chat_template_kwargs", "messages"),
    ("chat_template_kwargs", "self"), ("tokens", 0),
]  # fmt: skip

CONTROLS = "\x00\x1b[2J\u202e\u200b\ufeff\U000e0001 \r\n"
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 16, 17, 20, 21, 128, 129, 160, 199, 200, 0.5, -0.0, 1.5, 2.1, 5e-324, 1e308, 2**31,
    2**31 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40, -(2**63), -(2**63) - 1, "", "a", "0", "null", "user",
    CONTROLS, "é" * 10, "😀\u0301", "x" * 1025, "x" * 70_000, [], [None], [0], [[]], [1, "a"], ["a", 1], [True], [1.0],
    [[1], ["a"]], [{}], {}, {"": 0}, {"a": {}}, {"5": 1}, {"type": "text"}, [MODEL.vocab_size - 1], [MODEL.vocab_size],
    [2**63], ["a"] * 17, ["a"] * 129, [1] * 129, [1] * 3000, [[1]] * 129, {str(n): 1 for n in range(320)},
    {str(n): 1 for n in range(1025)}, {"5": -101}, {"5": 1e-320}, "cancel", "keep",
]  # fmt: skip
LITERALS: list[bytes] = [
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"1E-400", b"9" * 400, b"0x10", b"007", b"+1", b"1.", b".5",
    b"undefined", b"'a'", b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\x00"', b'"\xff\xfe"', b'"\xc3\x28"',
    b'"\xed\xa0\x80"', b'"\\x41"', b'"a', b"tru", b"[1,]", b"{,}", b'{"a":1,"a":2}', b'{"":1,"":2}', b"/* */ 1",
    b"[" * 33 + b"]" * 33, b'{"a":' * 40 + b"1" + b"}" * 40, b"[" * 100_000, b"[" * 2000 + b"]" * 2000,
]  # fmt: skip

HEADER_VALUES = [
    b"", b" ", b"a", b"0.0", b"0.end", b"1.start", b"0.end,0.end", b"end", b"-1.0", b"0.999999999999999999999", b"\xff",
    b"x" * 255, b"x" * 256, b"x" * 5000, b"\x01", "é".encode(), b"%00", b"respond-async", b"respond-async;wait=9, a",
    b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-zz",
    b"text/event-stream",
    b"99999999999999999999", b"-1", b"1e3", b"NaN", b"Bearer x", b"gzip", b"identity",
    b"application/json; charset=utf-16",
]  # fmt: skip
HEADERS = [
    b"idempotency-key", b"traceparent", b"tracestate", b"last-event-id", b"prefer", b"accept", b"authorization",
    b"content-type", b"content-encoding", b"content-length", b"host", b"x-slo-ttft-ms", b"x-slo-tpot-ms",
    b"x-llm-d-slo-ttft-ms", b"x-llm-d-slo-tpot-ms", b"x-request-id",
]  # fmt: skip
IDS = [
    "cmpl-0", "keyed-0", "", ".", "..", "...", "%2e%2e", "%2F", "a%2Fb", "%00", "%0d%0aset-cookie:a", "%ff",
    "%ed%a0%80", "é", "*", "{x}", "a;b", "a?b", "a:b.0", "a.0", "a" * 4000, "%25", "\\", "'", "%", "req:a", "0",
]  # fmt: skip
METHODS = ["GET", "GET", "GET", "DELETE", "HEAD", "POST", "PUT", "OPTIONS", "TRACE", "get", "X"]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call, as bytes and headers."""

    method: str
    path: str  # as in the request's line
    headers: tuple[tuple[bytes, bytes], ...] = ()
    chunks: tuple[bytes, ...] = (b"",)

    @property
    def is_generation(self) -> bool:
        return self.path in (COMPLETIONS, CHATS, RESPONSES)


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A call in the making."""

    path: str
    body: dict[str, Any]
    content: bytes | None = None  # the body as it is sent, where it is no plain JSON any more
    headers: dict[bytes, bytes] = field(default_factory=lambda: {b"content-type": b"application/json"})

    @property
    def text(self) -> bytes:
        return json.dumps(self.body).encode() if self.content is None else self.content


def bad_calls(seed: int, count: int) -> Iterator[Call]:
    """Yield `count` calls; some are good by chance."""
    draw = random.Random(seed)
    for _ in range(count):
        if draw.random() < 0.1:
            yield _of_a_request(draw)
            continue
        path = draw.choices(list(GOOD), (5, 5, 4, 2, 1))[0]
        call = Spoilt(path, copy.deepcopy(GOOD[path]))
        for spoil in draw.choices(list(WAYS), list(WAYS.values()), k=draw.choice((1, 1, 1, 2))):
            call = spoil(draw, call)
        content = call.text
        cut = draw.randrange(len(content) + 1)
        chunks = (content[:cut], b"", content[cut:]) if draw.random() < 0.2 else (content,)
        yield Call("POST", path, tuple(call.headers.items()), chunks)


def _field(draw: random.Random, call: Spoilt) -> Spoilt:
    """Another value somewhere. A deadline that passes is no fault of the server's: none is drawn."""
    name = draw.choice(FIELDS[call.path])
    value = draw.choice(VALUES)
    if name == "deadline_ms" and isinstance(value, int) and 0 < value < 2**31 - 1:
        value = -value
    return replace(call, body={**call.body, name: copy.deepcopy(value)})


def _inner_field(draw: random.Random, call: Spoilt) -> Spoilt:
    places = [place for place in INNER if place[0] in call.body]
    if not places:
        return _field(draw, call)
    *way, last = draw.choice(places)
    body = copy.deepcopy(call.body)
    inner: Any = body
    try:
        for name in way:
            inner = inner[name]
        inner[last] = draw.choice(VALUES)
    except (TypeError, LookupError):
        # What is on the way was spoilt before.
        return call
    return replace(call, body=body)


def _missing(draw: random.Random, call: Spoilt) -> Spoilt:
    gone = draw.choice([*call.body, ""])
    return replace(call, body={name: value for name, value in call.body.items() if name != gone})


def _literal(draw: random.Random, call: Spoilt) -> Spoilt:
    """Insert a literal that no Python value can produce."""
    name = draw.choice([*FIELDS[call.path], "unknown"])
    text = json.dumps({**call.body, name: "@"}).encode()
    return replace(call, content=text.replace(b'"@"', draw.choice(LITERALS)))


def _shape(draw: random.Random, call: Spoilt) -> Spoilt:
    """Prompts and messages of all shapes and sizes."""
    one = draw.choice(["a", 5, [5], ["a"], "", [], None, MODEL.vocab_size, CONTROLS, "long " * draw.choice((30, 9000))])
    shape = [one] * draw.choice((0, 1, 2, 128, 129, 5000))
    name = draw.choice(("prompt", "tokens", "messages", "stop", "stop_token_ids"))
    return replace(call, body={**call.body, name: [shape] if draw.random() < 0.3 else shape})


def _text(draw: random.Random, call: Spoilt) -> Spoilt:
    """The bytes of a body, damaged."""
    text = call.text
    at = draw.randrange(len(text) + 1)
    ways: list[Callable[[], bytes]] = [
        lambda: text[:at],
        lambda: text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :],
        lambda: text[:at] + draw.choice((b"\x00", b'"', b"{", b"\\", b"\xf0\x9f", b",,")) + text[at:],
        lambda: b"\xef\xbb\xbf" + text,
        lambda: text.decode("latin-1").encode("utf-16"),
        lambda: text.decode("latin-1").encode("utf-32"),
        lambda: gzip.compress(text, mtime=0),
        lambda: text + text,
        lambda: text[:-1] + b"," + text[1:],
        lambda: b"[" + text + b"]",
        lambda: draw.choice((b"", b" ", b"null", b"1", b'"a"', b"[]", b"{}", b"--x\r\n")),
        lambda: b" " * draw.choice((100, 70_000)) + text,
    ]
    return replace(call, content=draw.choice(ways)())


def _header(draw: random.Random, call: Spoilt) -> Spoilt:
    return replace(call, headers={**call.headers, draw.choice(HEADERS): draw.choice(HEADER_VALUES)})


WAYS = {_field: 9, _inner_field: 5, _missing: 1, _literal: 2, _shape: 3, _text: 2, _header: 6}
"""Ways to corrupt a call, each with its relative frequency."""


def _of_a_request(draw: random.Random) -> Call:
    path = draw.choice(("/v1/requests/", "/v1/requests/", "/v1/models/", "//v1/requests/", "/v1/./requests/", "/"))
    path += draw.choice(IDS) + draw.choice(("", "/result", "/events", "/events/", "//events", "/%2e%2e"))
    query = draw.choice(("", "", "?starting_after=" + draw.choice(IDS), "?" + "a=b&" * 500))
    headers = ((draw.choice(HEADERS), draw.choice(HEADER_VALUES)),) if draw.random() < 0.5 else ()
    return Call(draw.choice(METHODS), path + query, headers)


async def send(app: ASGIApp, call: Call) -> httpx.Response:
    """The whole answer to a call, as the application gave it."""
    path, _, query = call.path.partition("?")
    sent = list(call.chunks)
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": call.method, "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": list(call.headers), "client": ("127.0.0.1", 1), "server": ("orca", 80), "state": {},
    }  # fmt: skip
    told: list[Message] = []

    async def receive() -> Message:
        if not sent:
            # The client stays.
            await asyncio.Event().wait()
        return {"type": "http.request", "body": sent.pop(0), "more_body": bool(sent)}

    async def tell(message: Message) -> None:
        told.append(message)

    await app(scope, receive, tell)
    content = b"".join(message.get("body", b"") for message in told[1:])
    return httpx.Response(told[0]["status"], headers=told[0]["headers"], content=content)
