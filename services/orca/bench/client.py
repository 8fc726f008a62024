"""A load client for any server of the OpenAI completions API: sends a trace on time and records when each token came.

The client shares the machine with what it measures, so it does as little as possible. One `asyncio.Protocol` per
request parses HTTP/1.1 and server-sent events as the bytes arrive; this takes a quarter of the processor time that
httpx takes for a token. The load is open-loop: a request is sent when the trace says so, even if earlier ones failed or
still run.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from urllib.parse import urlsplit

import orjson

from orca.planner.simulate.outcomes import RequestOutcome
from orca.planner.workload.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """The server under load."""

    url: str  # scheme://host:port and a prefix, if the API has one; `/v1/completions` is appended
    model: str
    vocab_size: int  # prompts consist of token ids below it
    api_key: str | None = None
    timeout_s: float = 600.0  # a request that has not ended after this time has failed

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "localhost"

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if urlsplit(self.url).scheme == "https" else None


async def run_trace(target: LoadTarget, trace: Trace) -> list[RequestOutcome]:
    """Send every request of the trace when it is due and wait for all of them.

    Returns: one outcome per request, in order of arrival. The `error` of a failed one gives the reason; no exception
        is raised for it.
    """
    bodies = [request_bytes(target, trace, request) for request in trace.requests]
    start_s = perf_counter()
    calls = zip(trace.requests, bodies, strict=True)
    return await asyncio.gather(*(_call(target, request, body, start_s) for request, body in calls))


def request_bytes(target: LoadTarget, trace: Trace, request: TraceRequest) -> bytes:
    """Return the bytes of the HTTP call for a request of the trace."""
    deadline = {} if request.deadline_ms is None else {"deadline_ms": request.deadline_ms}
    return post_bytes(
        target,
        {
            **deadline,
            "model": target.model,
            "prompt": trace.prompt(request.index, target.vocab_size),
            "max_tokens": request.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        },
    )


def post_bytes(target: LoadTarget, content: Mapping[str, object]) -> bytes:
    """Return the bytes of any call of the completions API that is answered with events on its own connection."""
    body = orjson.dumps(content)
    path = urlsplit(target.url).path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    head = [
        f"POST {path} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Accept: text/event-stream",
        "Connection: close",
    ]
    if target.api_key is not None:
        head.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join([*head, "", ""]).encode() + body


async def _call(target: LoadTarget, request: TraceRequest, body: bytes, start_s: float) -> RequestOutcome:
    """Send one request when it is due and return its outcome."""
    await asyncio.sleep(start_s + request.arrival_s - perf_counter())
    sent_s = perf_counter()
    stream = EventStream(body)
    error = await read_stream(target, stream, request.new_tokens)
    return RequestOutcome(
        index=request.index,
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
        arrival_s=request.arrival_s,
        sent_s=sent_s - start_s,
        token_s=tuple(time_s - start_s for time_s in stream.token_s),
        token_ids=tuple(stream.token_ids),
        end_s=perf_counter() - start_s if stream.end_s is None else stream.end_s - start_s,
        error=error,
    )


async def read_stream(target: LoadTarget, stream: "EventStream", new_tokens: int) -> str | None:
    """Make a call now, and read its events until it ends.

    Args: new_tokens: of all choices together.
    Returns: why the call failed; None if it got exactly its tokens.
    """
    try:
        async with asyncio.timeout(target.timeout_s):
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: stream, target.host, target.port, ssl=target.tls)
            await stream.ended
        return stream.error or token_count_error(stream, new_tokens)
    except TimeoutError:
        return f"no end within {target.timeout_s:g} s"
    except OSError as failure:
        return f"connection: {failure}"
    finally:
        stream.close()


def token_count_error(stream: "EventStream", wanted: int) -> str | None:
    """Return the error of an answer that has not exactly `wanted` tokens; None if it has.

    Token ids are the best proof, then `usage`, then the number of events.
    """
    if stream.usage_tokens is not None and stream.usage_tokens != wanted:
        return "usage.completion_tokens is not max_tokens"
    is_proven_by_usage = stream.usage_tokens is not None and not stream.token_ids and stream.token_s
    if len(stream.token_s) != wanted and not is_proven_by_usage:
        return "not as many tokens as max_tokens"
    return None


class EventStream(asyncio.Protocol):
    """One HTTP call whose answer is a stream of completion events, parsed as the bytes arrive.

    A token is an entry of `choices[0].token_ids` if the server sends them (`return_token_ids`). Otherwise it is an
    event with a choice, as most servers send one token per event. The stream ends with `[DONE]`. A connection that
    closes before it, an error event or a status other than 200 sets `error`.
    """

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.token_s: list[float] = []
        self.token_ids: list[int] = []
        self.end_s: float | None = None
        self.usage_tokens: int | None = None
        self.cached_tokens: int | None = None  # of the prompt; None if the server does not say
        self.error: str | None = None
        self.status: int | None = None  # None until the head has arrived
        self.retry_after_s: float | None = None  # None if the answer has no such header
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._raw = bytearray()  # bytes of the head, or of incomplete chunks
        self._body = bytearray()  # decoded bytes that are not yet split into lines
        self._is_chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._raw += data
        try:
            self._read()
        except (ValueError, KeyError, TypeError) as failure:
            self._finish(f"not a stream of completions: {failure}")

    def _read(self) -> None:
        if self.status is None and not self._read_head():
            return
        if self._is_chunked:
            self._unchunk()
        else:
            self._body += self._raw
            self._raw.clear()
        if self.status == 200:
            self._read_events()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.status is not None and self.status != 200:
            self._finish(f"HTTP {self.status}: {_message(bytes(self._body))}")
        else:
            self._finish(f"connection: {exc}" if exc else "the stream broke off before [DONE]")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _read_head(self) -> bool:
        """Parse and remove the status line and headers. Returns: False while they are incomplete."""
        head, separator, rest = bytes(self._raw).partition(b"\r\n\r\n")
        if not separator:
            return False
        status_line, *headers = head.split(b"\r\n")
        self.status = int(status_line.split(b" ", 2)[1])
        self.retry_after_s = _retry_after_s(headers)
        self._is_chunked = any(
            header.lower().startswith(b"transfer-encoding:") and b"chunked" in header.lower() for header in headers
        )
        self._raw = bytearray(rest)
        return True

    def _unchunk(self) -> None:
        """Move complete chunks (`<hex length>[;...]\\r\\n<bytes>\\r\\n`) from raw to body."""
        raw, at = self._raw, 0
        while (line_end := raw.find(b"\r\n", at)) >= 0:
            length = int(raw[at:line_end].split(b";", 1)[0], 16)
            chunk_end = line_end + 2 + length
            if len(raw) < chunk_end + 2:
                break
            self._body += raw[line_end + 2 : chunk_end]
            at = chunk_end + 2
        del raw[:at]

    def _read_events(self) -> None:
        now_s = perf_counter()
        *whole, rest = self._body.split(b"\n")
        self._body = rest
        for line in whole:
            if line.startswith(b"data:"):
                self._read_event(bytes(line[5:].strip()), now_s)

    def _read_event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.end_s = now_s
            self._finish(None)
            return
        event = orjson.loads(data)
        if "error" in event:
            self._finish(f"in the stream: {_message(data)}")
            return
        usage = event.get("usage")
        if usage:
            self.usage_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in event.get("choices", ()):
            self._read_choice(choice, now_s)

    def _read_choice(self, choice: dict[str, object], now_s: float) -> None:
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self.token_ids += ids
            self.token_s += [now_s] * len(ids)
        elif choice.get("text") or choice.get("finish_reason") is None:
            self.token_s.append(now_s)

    def _finish(self, error: str | None) -> None:
        """Set the result of the call; only the first one counts."""
        if not self.ended.done():
            self.error = error
            self.ended.set_result(None)


def _retry_after_s(headers: Sequence[bytes]) -> float | None:
    """Return the pause that the headers ask for; like the official clients, prefer the one in milliseconds."""
    named = {name.lower(): value.strip() for name, _, value in (header.partition(b":") for header in headers)}
    for name, unit in ((b"retry-after-ms", 1000), (b"retry-after", 1)):
        if named.get(name, b"").isdigit():
            return int(named[name]) / unit
    return None


def _message(body: bytes) -> str:
    """Return the message of an error in the OpenAI format, or the start of any other body."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


async def get_json(target: LoadTarget, path: str) -> object:
    """Return the JSON of a small GET, such as `/v1/models`.

    Raises: OSError; ValueError if the answer is not 200 with JSON.
    """
    async with asyncio.timeout(target.timeout_s):
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key is not None else ""
        prefix = urlsplit(target.url).path.rstrip("/").removesuffix("/v1")
        writer.write(f"GET {prefix}{path} HTTP/1.0\r\nHost: {target.host}:{target.port}\r\n{key}\r\n".encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    status_line = head.split(b"\r\n", 1)[0].decode(errors="replace")
    status = status_line.split(" ", 2)[1:2]
    if status != ["200"]:
        hint = "; --api-key gives it a key" if status == ["401"] else ""
        raise ValueError(f"GET {path}: {status_line}{hint}")
    return orjson.loads(body)


async def served_models(target: LoadTarget) -> Sequence[str]:
    """Return the ids of the models that the server offers."""
    listing = await get_json(target, "/v1/models")
    assert isinstance(listing, dict)
    return [model["id"] for model in listing["data"]]
