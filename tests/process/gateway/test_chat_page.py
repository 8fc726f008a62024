"""The page at `/` in a real browser, in front of a real gateway. Its chats, keys, errors, and what a model decides."""

import asyncio
import json

import pytest

from orca.core.domain.request import FinishReason, Request
from orca.gateway.settings import GatewaySettings
from support.gateway.browser import HAS_ENDED, Browser, is_alone_with_its_server
from support.gateway.gateway_rig import FakeScheduler, ids, tokenizer, until
from support.gateway.gateway_server import served

pytestmark = pytest.mark.asyncio(loop_scope="session")

STARTED = "document.querySelector('.markdown').textContent.startsWith('Hello')"


async def test_a_conversation_sends_its_history_the_system_prompt_and_the_settings(browser: Browser) -> None:
    found: list[Request] = []

    def answer(request: Request) -> tuple[int, ...]:
        found.append(request)
        return (*ids("Hi, **Ann**."), 0)

    async with (
        served(make_scheduler=lambda pool: FakeScheduler(pool, answer=answer)) as one,
        browser.page(one.url) as page,
    ):
        await page.fill("#system", "Be kind.")
        await page.fill("[data-field=top_p]", "0.5")
        await page.fill("#stops", "END\nSTOP")
        await page.say("Hello")
        assert await page.run("document.querySelector('.assistant strong').textContent") == "Ann"
        assert "tokens/s" in await page.text(".status")
        await page.say("Sure?")
        assert await page.texts(".user .text") == ["Hello", "Sure?"]
        assert is_alone_with_its_server(page)
    assert tokenizer().decode(found[1].prompt, skip_special_tokens=False) == (
        "<|user|>system: Be kind.\n<|user|>user: Hello\n<|user|>assistant: Hi, **Ann**.\n<|user|>user: Sure?\n"
        "assistant:"
    )
    sampling = found[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.8, 0.5, ("END", "STOP"))


async def test_the_stop_button_cancels_the_call_and_the_text_stays_in_the_conversation(browser: Browser) -> None:
    async with served(make_scheduler=lambda pool: FakeScheduler(pool, turns_left=8)) as one:
        async with browser.page(one.url) as page:
            await page.say("Hello", STARTED)
            [request_id] = one.rig.scheduler.running
            await page.click("#chat-stop")
            await page.until(HAS_ENDED)
            assert (await page.text(".status")).endswith("stopped")
            assert await page.run("turns.map(turn => turn.message.role)") == ["user", "assistant"]
            await until(lambda: any(url.endswith(f"/v1/requests/{request_id.split('.')[0]}") for url in page.urls))
            assert is_alone_with_its_server(page)

        async def is_cancelled() -> bool:
            end = (await one.rig.pool.status(request_id)).end
            return end is not None and end.reason is FinishReason.CANCELLED

        await until(is_cancelled)


async def test_an_answer_goes_on_after_its_connection_broke(browser: Browser) -> None:
    async with (
        served(make_scheduler=lambda pool: FakeScheduler(pool, turns_left=8)) as one,
        browser.page(one.url) as page,
    ):
        await page.say("Hello", STARTED)
        for connection in list(one.server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await until(lambda: any(url.endswith("/events") for url in page.urls))
        one.rig.scheduler.turns_left = None
        one.rig.scheduler.may_run.set()
        await page.until(HAS_ENDED)
        assert await page.text(".markdown") == "Hello, wörld 🐋 and more."
        assert await page.texts(".assistant .error") == []
        assert is_alone_with_its_server(page)


async def test_a_server_with_keys_asks_for_one_and_takes_it_from_the_settings(browser: Browser) -> None:
    settings = GatewaySettings(model="tiny", port=0, drain_seconds=1, api_keys=("right",))
    async with served(settings) as one, browser.page(one.url) as page:
        await page.say("Hello")
        assert await page.text("article .error") == "The server needs an API key. Enter yours in the settings."
        await page.fill("#key", "wrong")
        await page.click(".again")
        await page.until(f"{HAS_ENDED} && document.querySelector('.assistant .error').textContent.includes('accept')")
        await page.fill("#key", "ключ")
        await page.click(".again")
        await page.until(
            f"{HAS_ENDED} && document.querySelector('.assistant .error').textContent.includes('characters')"
        )
        await page.fill("#key", "right")
        await page.click(".again")
        await page.until(f"{HAS_ENDED} && !document.querySelector('.assistant .error')")
        assert "Hello" in await page.text(".markdown")
        assert "right" not in await page.run("JSON.stringify({...sessionStorage, ...localStorage}) + document.cookie")
        assert is_alone_with_its_server(page)


async def test_errors_come_in_plain_words_with_what_the_server_says(browser: Browser) -> None:
    async with served() as one, browser.page(one.url) as page:
        await page.fill("#tokens", "5000")
        await page.say("Hello")
        assert (await page.text("article .error")).startswith(
            "The server refused the call: This model's maximum context"
        )
        await page.fill("#tokens", "0")
        await page.fill("#message", "Again")
        await page.press_enter()
        assert await page.run("document.querySelector('#tokens:invalid') === document.activeElement")
        await page.fill("#tokens", "5")
        one.server.should_exit = one.server.force_exit = True
        await one.task
        await page.click("#say")
        await page.until("document.querySelector('.assistant:last-child .error')")
        assert (await page.text("article .error")).startswith("The server does not answer. Check that it runs")
        # A message without an answer is replaced by the next, and not sent with it.
        assert await page.run("turns.map(turn => turn.message.content)") == ["Again"]
        assert is_alone_with_its_server(page)


async def test_the_completion_mode_shows_the_text_and_its_speed_and_stops(browser: Browser) -> None:
    async with served() as one, browser.page(one.url) as page:
        await page.fill("#api", "completion")
        assert await page.run("byId('tokens').value") == "64"
        await page.click("#send")
        await page.until("byId('stop').disabled && byId('status').textContent.includes('tokens/s')")
        assert await page.text("#answer") == " Hello, wörld 🐋 and more."
        assert (await page.text("#status")).startswith("19 tokens, first after ")
        one.rig.scheduler.turns_left = 3
        await page.click("#send")
        await page.until("byId('answer').textContent === ' He'")
        await page.click("#stop")
        await page.until("byId('status').textContent === 'stopped' && byId('stop').disabled")
        assert is_alone_with_its_server(page)


async def test_a_replaced_call_does_not_change_stop_button_and_status_of_the_new_one(browser: Browser) -> None:
    async with (
        served(make_scheduler=lambda pool: FakeScheduler(pool, turns_left=0)) as one,
        browser.page(one.url) as page,
    ):
        await page.fill("#api", "completion")
        for calls in (1, 2):
            await page.click("#send")
            await until(lambda calls=calls: sum(url.endswith("/completions") for url in page.urls) == calls)
        assert await page.run("[byId('stop').disabled, byId('status').textContent]") == [False, "waiting"]
        await page.click("#stop")
        await page.until("byId('stop').disabled && byId('status').textContent === 'stopped'")


async def test_a_model_without_a_chat_template_has_the_completion_mode_only(browser: Browser) -> None:
    async with served(chat_template=None) as one, browser.page(one.url) as page:
        await page.until("!byId('completion').hidden")
        assert await page.run("[byId('api').value, byId('api').hidden, byId('new').hidden]") == [
            "completion",
            True,
            True,
        ]
        assert await page.run("[byId('prefixed').hidden, byId('target').hidden]") == [True, True]
        assert json.loads(await page.run("JSON.stringify(thisCall())")) == {
            "path": "/v1/completions",
            "body": {"max_tokens": 64, "temperature": 0.8, "prompt": "Once upon a time"},
        }


async def test_the_page_says_when_the_model_is_not_loaded_yet(browser: Browser) -> None:
    async with served(schedules=False) as one, browser.page(one.url) as page:
        await page.until("!byId('notice').hidden")
        assert (await page.text("#notice")).startswith("The server is not ready yet.")
        await one.rig.pool.promise_slots("r1", 160)
        scheduler = asyncio.create_task(one.rig.scheduler.run())
        await page.until("byId('notice').hidden")
        scheduler.cancel()
        await asyncio.gather(scheduler, return_exceptions=True)
