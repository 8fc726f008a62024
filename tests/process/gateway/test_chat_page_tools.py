"""Tool calls, reasoning and looks of the page at `/`, in a real browser, with answers that the test writes."""

import asyncio
import json

import pytest

from orca.core.domain.request import Request
from orca.pool.api import RequestPool
from support.gateway.browser import HAS_ENDED, Browser, Page, is_alone_with_its_server
from support.gateway.gateway_rig import FakeScheduler
from support.gateway.gateway_server import served
from support.gateway.scripted_chat import (
    CALL_ID,
    DONE,
    Answer,
    call_pieces,
    event,
    refusal,
    scripted_chat,
    stream,
)
from support.gateway.tool_rig import ids, template
from support.gateway.tool_rig import served as tool_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TWO_CALLS = stream(
    {"role": "assistant", "content": ""},
    {"content": "Let me look.", "tool_calls": None},
    *call_pieces(0, "c0", "weather", '{"ci', 'ty": "Bern', '"}'),
    *call_pieces(1, "c1", "weather", '{"city": "Rom"}'),
    finish_reason="tool_calls",
)


async def test_calls_are_folded_and_their_results_continue_the_conversation(browser: Browser) -> None:
    async with (
        scripted_chat(TWO_CALLS, stream({"content": "Sun "}, {"content": "in both."})) as chat,
        browser.page(chat.url) as page,
    ):
        await page.fill("#tools", json.dumps(TOOLS))
        await page.fill("#tool-choice", "required")
        await page.say("Weather in Bern and Rom?")
        assert await page.texts(".call summary") == [
            'Call of weather: {"city": "Bern"}',
            'Call of weather: {"city": "Rom"}',
        ]
        assert await page.run("[...document.querySelectorAll('details')].some(one => one.open)") is False
        await page.fill("#message", "Hurry")
        await page.press_enter()
        await page.fill(".result", "20 C")
        await page.click(".results .primary")
        assert await page.text(".results .error") == "Every call needs a result."
        assert len(chat.bodies) == 1
        await page.fill(".call:nth-child(2) .result", "30 C")
        await page.click(".results .primary")
        await page.until(f"{HAS_ENDED} && document.querySelectorAll('.assistant').length === 2")
        assert await page.text(".markdown") == "Sun in both."
        assert await page.texts(".given") == ["20 C", "30 C"]
        assert await page.run("document.querySelectorAll('.result').length") == 0
        assert is_alone_with_its_server(page)
    first, second = chat.bodies
    assert first["tools"] == second["tools"] == TOOLS
    assert first["tool_choice"] == "required"
    assert second["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c0", "content": "20 C"},
        {"role": "tool", "tool_call_id": "c1", "content": "30 C"},
    ]


async def test_a_tool_turn_in_front_of_a_real_gateway(browser: Browser) -> None:
    source = template("hermes", thinks=True)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    texts, asked = [f"<think>\nWhere?\n</think>\n\n{call}", "It is sunny."], []

    def answer(request: Request) -> tuple[int, ...]:
        asked.append(request)
        return ids(source, texts[len(asked) - 1])

    model = tool_model(source)

    def scheduler(pool: RequestPool) -> FakeScheduler:
        return FakeScheduler(pool, answer=answer, tokenizer=model.tokenizer)

    async with (
        served(newest=model, model=model.info, slots=2000, make_scheduler=scheduler) as one,
        browser.page(one.url) as page,
    ):
        await page.fill("#tools", json.dumps(TOOLS))
        await page.say("Weather in Bern?")
        assert await page.texts(".call summary") == ['Call of weather: {"city": "Bern"}']
        await page.fill(".result", "30 C")
        await page.click(".results .primary")
        await page.until(f"{HAS_ENDED} && document.querySelectorAll('.assistant').length === 2")
        assert await page.text(".markdown") == "It is sunny."
    prompt = model.tokenizer.decode(asked[1].prompt, skip_special_tokens=False)
    assert call in prompt
    assert "<|tool|>30 C of call_" in prompt


async def test_a_call_that_was_cut_off_takes_no_result_and_is_not_sent_again(browser: Browser) -> None:
    cut = stream(*call_pieces(0, "c0", "weather", '{"city": "Be'), finish_reason="length")
    async with scripted_chat(cut, stream({"content": "Well."})) as chat, browser.page(chat.url) as page:
        await page.say("Weather?")
        assert await page.text(".call .error") == "This call is not complete, so it can have no result."
        assert "Max tokens" in await page.text(".status")
        await page.say("Once more", f"{HAS_ENDED} && document.querySelectorAll('.assistant').length === 2")
        assert chat.bodies[1]["messages"][1] == {"role": "assistant", "content": ""}
        assert "tools" not in chat.bodies[0]


async def test_reasoning_is_folded_and_goes_back_with_the_history(browser: Browser) -> None:
    gate = asyncio.Event()
    thoughts = [event(reasoning_content=text, reasoning=text, content=None) for text in ("Let me ", "think.")]
    answer = Answer([*thoughts, gate, event(content="42."), event("stop"), DONE])
    async with scripted_chat(answer, stream({"content": "Yes."})) as chat, browser.page(chat.url) as page:
        await page.say("Why?", "document.querySelector('.reasoning-text').textContent === 'Let me think.'")
        assert await page.text(".reasoning summary") == "Reasoning …"
        gate.set()
        await page.until(HAS_ENDED)
        assert await page.run("document.querySelector('.reasoning').open") is False
        assert await page.text(".reasoning summary") == "Reasoning"
        assert await page.text(".markdown") == "42."
        await page.say("Sure?", f"{HAS_ENDED} && document.querySelectorAll('.assistant').length === 2")
    answered = {"role": "assistant", "content": "42.", "reasoning_content": "Let me think."}
    assert chat.bodies[1]["messages"][1] == answered


async def test_settings_that_are_not_json_are_explained_and_nothing_is_sent(browser: Browser) -> None:
    async with scripted_chat(stream({"content": "Hi."})) as chat, browser.page(chat.url) as page:
        for text in ("[{", '{"type": "function"}', "7"):
            await page.fill("#tools", text)
            assert (await page.text("#tools + .error")).startswith("This must be a JSON list: ")
            await page.fill("#message", "Hello")
            await page.press_enter()
        assert await page.run("turns.length") == 0
        assert not chat.calls
        await page.fill("#tools", "")
        await page.fill("#extra", '{"response_format": {"type": "json_object"}}')
        await page.say("Hello")
        assert chat.bodies[0]["response_format"] == {"type": "json_object"}
        assert is_alone_with_its_server(page)


async def test_a_message_is_edited_an_answer_is_tried_again_and_a_conversation_is_new(browser: Browser) -> None:
    answers = [stream({"content": text}) for text in ("One.", "Two.", "Three.")]
    async with scripted_chat(*answers) as chat, browser.page(chat.url) as page:
        await page.say("Helo")
        await page.click(".user .small")
        assert await page.run("[byId('message').value, log.children.length]") == ["Helo", 0]
        await page.say("Hello")
        await page.click(".again")
        await page.until(f"{HAS_ENDED} && document.querySelector('.markdown').textContent === 'Three.'")
        assert [body["messages"] for body in chat.bodies] == [
            [{"role": "user", "content": text}] for text in ("Helo", "Hello", "Hello")
        ]
        await page.click("#new")
        assert await page.run("[turns.length, log.children.length]") == [0, 0]
        assert is_alone_with_its_server(page)


async def test_shift_and_enter_begin_a_line_and_enter_sends(browser: Browser) -> None:
    async with scripted_chat(stream({"content": "Hi."})) as chat, browser.page(chat.url) as page:
        await page.fill("#message", "One")
        await page.press_enter(shift=True)
        # The answer to a key does not say that the field has its text.
        await page.until("byId('message').value === 'One\\n'")
        await page.command("Input.insertText", text="Two")
        await page.until("byId('message').value === 'One\\nTwo'")
        await page.press_enter()
        await page.until(HAS_ENDED)
        assert chat.bodies[0]["messages"] == [{"role": "user", "content": "One\nTwo"}]


async def test_a_stream_that_breaks_goes_on_after_its_last_event(browser: Browser) -> None:
    draining = b'event: resume\ndata: {"error": {"code": "gateway_draining", "message": "x"}, "resume": {}}\n\n'
    async with (
        scripted_chat(
            Answer([event(event_id="0.0", content="One "), event(event_id="0.1", content="two ")]),
            refusal(503, "this gateway is shutting down"),
            Answer([b": waiting\n\n", event(event_id="0.2", content="three "), draining]),
            # A busy browser may lose a connection, and then asks for the same events again.
            *[Answer([event("stop", event_id="0.end", content="four"), b"id: end\n" + DONE])] * 3,
        ) as chat,
        browser.page(chat.url) as page,
    ):
        await page.say("Count")
        calls = [(call.path, call.headers.get("last-event-id")) for call in chat.calls]
        assert await page.text(".markdown") == "One two three four", calls
    events = f"/v1/requests/{CALL_ID}/events"
    assert calls[:4] == [("/v1/chat/completions", None), *((events, last) for last in ("0.1", "0.1", "0.2"))]
    assert set(calls[4:]) <= {(events, "0.2")}


async def test_failures_are_told_in_plain_words_and_the_text_so_far_stays(browser: Browser) -> None:
    failed = b'data: {"error": {"message": "the request\'s deadline passed", "type": "timeout_error"}}\n\n'
    answers = {
        "The server takes no more calls from you at the moment: the queue is full. Try again in 7 s.": refusal(
            429, "the queue is full", retry_after="7"
        ),
        "The server cannot answer at the moment: the request pool does not answer.": refusal(
            503, "the request pool does not answer"
        ),
        "The server failed: it sent HTTP 502 without an explanation.": Answer([b"<html>"], 502),
        "The server sent something that is no answer.": Answer([b"data: {x\n\n"]),
        "The answer ended early: the request's deadline passed.": Answer([event(content="So far"), failed]),
    }
    async with scripted_chat(*answers.values()) as chat, browser.page(chat.url) as page:
        for words in answers:
            await page.say("Hello", f"{HAS_ENDED} && document.querySelector('.assistant:last-child .error')")
            assert (await page.text(".assistant .error")).startswith(words)
            await page.click("#new") if "early" not in words else None
        assert await page.text(".markdown") == "So far"
        assert await page.run("turns.at(-1).message.content") == "So far"
        assert is_alone_with_its_server(page)


HOSTILE = "</pre></details><img src=https://evil.test/x onerror='hacked=1'><script>hacked=1</script>"


async def test_html_in_any_part_of_an_answer_is_text(browser: Browser) -> None:
    answer = stream(
        {"reasoning_content": HOSTILE, "content": f"{HOSTILE}\n\n![x](https://evil.test/y.png)\n\n{HOSTILE}"},
        *call_pieces(0, HOSTILE, HOSTILE, HOSTILE),
        finish_reason="tool_calls",
    )
    error = refusal(400, HOSTILE)
    async with scripted_chat(answer, error, model=HOSTILE) as chat, browser.page(chat.url) as page:
        await page.say(HOSTILE)
        await page.fill(".result", HOSTILE)
        await page.click(".results .primary")
        await page.until("document.querySelector('article > .error')")
        assert await page.run("document.querySelectorAll('img, body script ~ script, article script').length") == 0
        assert await page.run("new Promise(resolve => setTimeout(() => resolve(typeof hacked), 0))") == "undefined"
        for selector in ("#model", ".user .text", ".reasoning-text", ".call summary", ".arguments", ".given", ".error"):
            assert HOSTILE in " ".join(await page.texts(selector)), selector
        assert is_alone_with_its_server(page)


LONG = "\n\n".join(
    (
        "# Title",
        "word " * 60,
        "x" * 300,
        f"```py\n{'code ' * 60}\n```",
        "|a|b|\n|-|-|\n" + f"|{'cell ' * 30}|b|",
        "> quote",
    )
)
CONTRAST = """(() => {
  const channel = value => (value /= 255) <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
  const light = color => { const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
    return .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b); };
  const ground = node => { for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (color !== "rgba(0, 0, 0, 0)" && color !== "transparent") return color; } return "rgb(255, 255, 255)"; };
  return [...document.querySelectorAll("body *")].filter(node => node.checkVisibility() && !node.disabled &&
      [...node.childNodes].some(one => one.nodeType === 3 && one.data.trim())).map(node => {
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => b - a);
    return [(a + .05) / (b + .05), node.tagName + "." + node.className, node.textContent.slice(0, 20)]; })
    .filter(([contrast]) => contrast < 4.5);
})()"""


async def check_looks(page: Page) -> None:
    for width in (360, 1280):
        for is_dark in (False, True):
            await page.show_on(width=width, is_dark=is_dark)
            assert await page.run(CONTRAST) == []
            assert await page.run(
                "document.documentElement.scrollWidth <= innerWidth && log.scrollWidth <= log.clientWidth"
            )
            bottom = await page.run("byId('composer').getBoundingClientRect().bottom")
            assert bottom <= 800


async def test_every_text_is_readable_in_light_and_dark_and_fits_a_phone(browser: Browser) -> None:
    answer = stream(
        {"reasoning_content": "Hm. " * 100, "content": LONG},
        *call_pieces(0, "c0", "weather", '{"city": "' + "Bern " * 100 + '"}'),
        finish_reason="tool_calls",
    )
    async with scripted_chat(answer, refusal(400, "wrong " * 50)) as chat, browser.page(chat.url) as page:
        await page.fill("#tools", "[")
        await page.fill("#tools", "")
        await page.say("Hello " * 50)
        await check_looks(page)
        await page.fill(".result", "20 C")
        await page.click(".results .primary")
        await page.until("document.querySelector('article > .error')")
        await page.run("document.querySelectorAll('details').forEach(one => one.open = true)")
        await check_looks(page)
        await page.show_on(width=360)
        await page.run("byId('settings').hidden = false")
        assert await page.run("byId('settings').getBoundingClientRect().width") == 360
        assert await page.run("byId('settings').scrollWidth <= byId('settings').clientWidth")
        await page.click("#hide-settings")
        assert await page.run("byId('settings').checkVisibility()") is False


async def test_a_phone_opens_the_page_with_closed_settings(browser: Browser) -> None:
    async with scripted_chat() as chat, browser.page(chat.url, width=360) as page:
        await page.until("!byId('chat').hidden")
        assert await page.run("byId('settings').hidden") is True
        await page.click("#show-settings")
        assert await page.run("byId('settings').checkVisibility()") is True
