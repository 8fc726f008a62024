"""Events of a stream go past the middleware. Its start goes through it, and its end is as of any answer."""

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca.gateway.http.connection import SEND_BODY
from support.gateway.gateway_server import LIMIT_SECONDS, served

CALL = {"model": "tiny", "prompt": "the fox", "max_tokens": 3, "stream": True}


class Witness:
    """Middleware that notes what goes through it."""

    def __init__(self, app: ASGIApp, seen: list[str], *, hides: bool) -> None:
        """Args: hides: the extension, as a server would that has none."""
        self._app, self._seen, self._hides = app, seen, hides

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            self._seen.append(message["type"])
            await send(message)

        if self._hides:
            scope.get("extensions", {}).pop(SEND_BODY, None)
        await self._app(scope, receive, noting if scope.get("path") == "/v1/completions" else send)


@pytest.mark.parametrize("hides", [False, True])
async def test_middleware_sees_the_start_of_a_stream_separately_if_the_server_supports_it(*, hides: bool) -> None:
    seen: list[str] = []
    async with served() as one:
        one.server.config.loaded_app = Witness(one.server.config.loaded_app, seen, hides=hides)
        async with httpx.AsyncClient(base_url=one.url, timeout=LIMIT_SECONDS) as client:
            answer = await client.post("/v1/completions", json=CALL)
    assert answer.text.count("data: ") == 4 + 1  # three tokens, the end, [DONE]
    assert answer.text.endswith("data: [DONE]\n\n")
    assert seen[0] == "http.response.start"
    assert (len(seen) > 1) is hides


async def test_a_head_request_of_a_stream_gets_headers_and_no_events() -> None:
    async with served() as one, httpx.AsyncClient(base_url=one.url, timeout=LIMIT_SECONDS) as client:
        background = await client.post("/v1/completions", json=CALL | {"stream": False, "background": True})
        events = f"/v1/requests/{background.json()['id']}/events"
        whole = await client.get(events)
        head = await client.head(events)
        again = await client.get(events)  # nothing of a body is left on the connection
    assert "data: [DONE]" in whole.text
    assert head.status_code == 200
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.content == b""
    assert again.text == whole.text
