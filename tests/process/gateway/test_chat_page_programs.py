"""The call of the page at `/` as a program makes it: what the page shows for curl and for the openai client."""

import ast
import json
import shlex
from typing import Any

import pytest

from support.gateway.browser import Browser, Page
from support.gateway.scripted_chat import scripted_chat

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def programs(page: Page) -> tuple[list[str], dict[str, Any], str]:
    """Return the words of the curl example, its body and the example of the client."""
    await page.click("#show-programs")
    await page.until("byId('programs').open")
    [curl], [client] = await page.texts("#curl"), await page.texts("#client")
    await page.click("#hide-programs")
    words = shlex.split(curl)
    assert compile(client, "example", "exec")
    return words, json.loads(words[-1]), client


def arguments(client: str) -> dict[str, Any]:
    """Return the arguments of the call in the example of the client."""
    calls = [node for node in ast.walk(ast.parse(client)) if isinstance(node, ast.Call)]
    [created] = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "create"]
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in created.keywords}


async def test_the_call_of_an_encoder_decoder_model(browser: Browser) -> None:
    state = {"model": "orca-restore", "is_encoder_decoder": True, "has_chat_template": False}
    async with scripted_chat(**state) as chat, browser.page(chat.url) as page:
        await page.until("!byId('prefixed').hidden && !byId('target').hidden")
        assert await page.text("#input") == "Source"
        words, body, client = await programs(page)
        assert words[:2] == ["curl", f"{chat.url}/v1/completions"]
        assert body == {"model": "orca-restore", "max_tokens": 64, "temperature": 0, "prompt": "is mr darcy at home"}
        assert arguments(client) == body
        assert f'base_url="{chat.url}/v1", api_key="none"' in client
        text = 'it\'s "odd" \\ $HOME\n`end` \U0001f600'
        await page.fill("#prompt", text)
        await page.run(f"byId('prefix').value = {json.dumps(text.replace(chr(10), ' '))}")
        _, body, client = await programs(page)
        assert body["prompt"] == arguments(client)["prompt"] == text
        assert arguments(client)["extra_body"] == {"decoder_prefix": text.replace("\n", " ")}


async def test_the_call_of_a_chat_has_its_tools_and_names_the_variable_of_the_key(browser: Browser) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"default": None}}}]
    async with scripted_chat() as chat, browser.page(chat.url) as page:
        await page.fill("#key", "secret")
        await page.fill("#message", "hi")
        await page.fill("#system", "Be kind.")
        await page.fill("#tools", json.dumps(tools))
        await page.fill("[data-field=top_k]", "5")
        words, body, client = await programs(page)
        assert words[1] == f"{chat.url}/v1/chat/completions"
        assert "Authorization: Bearer $ORCA_API_KEY" in words
        assert body == {
            "model": "tiny",
            "temperature": 0.8,
            "top_k": 5,
            "tools": tools,
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
        }
        assert arguments(client) == {k: v for k, v in body.items() if k != "top_k"} | {"extra_body": {"top_k": 5}}
        assert 'api_key=os.environ["ORCA_API_KEY"]' in client
        assert "client.chat.completions.create(" in client
        assert "secret" not in client + " ".join(words)
