"""`continue_final_message` of a call: the prompt ends with the assistant's text, in /tokenize and in chats alike."""

from typing import Any

import pytest

from orca.core.domain.request import Request
from support.gateway.gateway_rig import FakeScheduler, recording, rig, tokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
HALF = {"role": "assistant", "content": "Well, I"}
OPEN = "<|user|>user: hi\n<|user|>assistant: Well, I"


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}], ids=str)
async def test_the_answer_continues_the_last_message(more: dict[str, Any]) -> None:
    accepted: list[Request] = []
    fields = {"messages": [USER, HALF], "continue_final_message": True, **more}
    async with rig(make_scheduler=lambda pool: FakeScheduler(pool, answer=recording(accepted))) as one:
        response = await one.post(CHAT, max_tokens=1, **fields)
        assert response.status_code == 200, response.text
        tokens = (await one.post("/tokenize", **fields)).json()["tokens"]
    assert tuple(tokens) == accepted[0].prompt
    assert tokenizer().decode(tokens, skip_special_tokens=False) == OPEN


async def test_false_and_null_change_nothing() -> None:
    async with rig() as one:
        found = [
            (await one.post("/tokenize", messages=[USER, HALF], **fields)).json()["tokens"]
            for fields in ({}, {"continue_final_message": False}, {"continue_final_message": None})
        ]
    assert found[0] == found[1] == found[2]
    assert tokenizer().decode(found[0], skip_special_tokens=False) == f"{OPEN}\nassistant:"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [USER, HALF], "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [HALF, USER]}, "assistant"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "text"),
        ({"messages": [USER, HALF], "continue_final_message": "yes"}, "true or false"),
    ],
    ids=str,
)
async def test_what_cannot_be_continued_is_refused(path: str, fields: dict[str, Any], words: str) -> None:
    async with rig(schedules=False) as one:
        status, error = await one.error(path, **{"continue_final_message": True, **fields})
        assert (status, error["param"]) == (400, "continue_final_message")
        assert words in error["message"]


async def test_a_template_that_cuts_the_text_is_named() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content[:12] }}\n{% endfor %}"
    async with rig(chat_template=template, schedules=False) as one:
        status, error = await one.error(CHAT, messages=[USER, HALF], continue_final_message=True)
        assert (status, error["param"]) == (400, "continue_final_message")
        assert "template" in error["message"]
