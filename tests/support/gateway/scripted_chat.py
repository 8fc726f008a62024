"""A server with the page at `/` whose answers a test writes, event by event, also those that a gateway rarely gives."""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orca.gateway.routes.chat_page import chat_page

CALL_ID = "call-of-the-test"

Part = bytes | asyncio.Event
"""Bytes of an answer, or an event that the server waits for before it goes on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to one call."""

    parts: Sequence[Part]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})


@dataclass(frozen=True, slots=True)
class ReceivedCall:
    """A call that the page made."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class ScriptedChat:
    """The server. Each call that generates or resumes takes the next answer."""

    state: Mapping[str, Any]
    url: str = ""
    answers: deque[Answer] = field(default_factory=deque)
    calls: list[ReceivedCall] = field(default_factory=list)  # besides those that open the page
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def bodies(self) -> list[Any]:
        """Return the bodies of the calls that generate, in order."""
        return [call.body for call in self.calls if call.method == "POST"]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one call of one connection."""
        if (task := asyncio.current_task()) is not None:
            self.tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            call = await _read(reader)
            answer = self._answer(call)
            head = f"HTTP/1.1 {answer.status} X\r\nconnection: close\r\nx-request-id: {CALL_ID}\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
            writer.write(head.encode() + b"\r\n")
            for part in answer.parts:
                if isinstance(part, asyncio.Event):
                    await part.wait()
                else:
                    writer.write(part)
                    await writer.drain()
        writer.close()

    def _answer(self, call: ReceivedCall) -> Answer:
        if call.path == "/":
            page = chat_page()
            return Answer([bytes(page.body)], headers={**page.headers})
        if call.path == "/ready":
            return _json(200, self.state)
        self.calls.append(call)
        return self.answers.popleft() if call.method != "DELETE" and self.answers else _json(404, {})


async def _read(reader: asyncio.StreamReader) -> ReceivedCall:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return ReceivedCall(method, path, headers, json.loads(body) if body else None)


def _json(status: int, value: Any, **headers: str) -> Answer:
    return Answer([json.dumps(value).encode()], status, {"content-type": "application/json", **headers})


def refusal(status: int, message: str, **headers: str) -> Answer:
    """Return an error answer in OpenAI's shape."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return _json(status, {"error": {"message": message, "type": "x", "param": None, "code": "x"}}, **named)


def event(finish_reason: str | None = None, /, *, event_id: str | None = None, **delta: Any) -> bytes:
    """Return one chunk of a chat's stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    data = f"data: {json.dumps({'id': CALL_ID, 'choices': [choice]})}\n\n"
    return (data if event_id is None else f"id: {event_id}\n{data}").encode()


DONE = b"data: [DONE]\n\n"


def stream(*deltas: dict[str, Any], finish_reason: str = "stop") -> Answer:
    """Return a whole stream of these deltas."""
    return Answer([*(event(**delta) for delta in deltas), event(finish_reason), DONE])


def call_pieces(index: int, call_id: str, name: str, *arguments: str) -> list[dict[str, Any]]:
    """Return the deltas of a tool call: its id and name, then its arguments in pieces."""
    first = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
    rest = [{"index": index, "function": {"arguments": piece}} for piece in arguments]
    return [{"tool_calls": [piece]} for piece in (first, *rest)]


STATE = {"ready": True, "model": "tiny", "is_encoder_decoder": False, "has_chat_template": True}
"""The parts of /ready that the page reads."""


@contextlib.asynccontextmanager
async def scripted_chat(*answers: Answer, **state: Any) -> AsyncIterator[ScriptedChat]:
    """Serve the page on a loopback port until the block ends. Args: state: changes of what /ready says."""
    chat = ScriptedChat(STATE | state, answers=deque(answers))
    server = await asyncio.start_server(chat.serve, "127.0.0.1", 0)
    chat.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield chat
    finally:
        server.close()
        for task in chat.tasks:
            task.cancel()
        await asyncio.gather(*chat.tasks, return_exceptions=True)
