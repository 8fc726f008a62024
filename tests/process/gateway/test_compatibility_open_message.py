"""`continue_final_message`: the prompt is the one that transformers renders, or the call is refused."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from orca.core.domain.errors import InvalidRequest
from orca.gateway.models.chat_template import ChatTemplate
from support.gateway.chat_templates import CHAT_TEMPLATES
from support.gateway.tool_rig import FORMATS, template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    **CHAT_TEMPLATES,
    **{f"tools of {name}": template(name, thinks=True) for name in FORMATS},
    "trimmed": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>\n{% endfor %}",
    "trimmed, with a space": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} </s>\n{% endfor %}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }} {% endgeneration %}{% endfor %}",
    "generation prompt always": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    "cut": "{% for m in messages %}{{ m.role }}: {{ m.content[:12] }}\n{% endfor %}",
}
TEXTS = ["It is", "It is ", "It is\n", "  It is  ", "é 🐋 <b>", "", "long " * 12 + "end"]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", TEXTS, ids=[repr(text)[:20] for text in TEXTS])
def test_an_open_message_ends_the_prompt_as_with_transformers(name: str, text: str) -> None:
    chat: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": text}]
    ours = ChatTemplate(TEMPLATES[name], TOKENS)
    try:
        (expected,), _ = render_jinja_template(
            [chat], chat_template=TEMPLATES[name], continue_final_message=True, **TOKENS
        )
    except Exception:
        with pytest.raises(InvalidRequest):
            ours.prompt(chat, add_generation_prompt=False, continues_final_message=True)
        return
    found = ours.prompt(chat, add_generation_prompt=False, continues_final_message=True)
    assert found == expected
    assert found.rstrip().endswith(text.strip())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Transformers refuses the first, and leaves its own mark in the prompt of the second.
        ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}</s>{% endfor %}", "hi</s>It"),
        ("{% for m in messages %}{{ m.content }}|{{ m.content }}</s>{% endfor %}", None),
    ],
)
def test_thoughts_may_be_cut_and_a_text_that_comes_twice_is_refused(source: str, expected: str | None) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>a</think>It"}]
    one = ChatTemplate(source, TOKENS)
    if expected is None:
        with pytest.raises(InvalidRequest, match="continue_final_message: "):
            one.prompt(chat, add_generation_prompt=False, continues_final_message=True)
    else:
        assert one.prompt(chat, add_generation_prompt=False, continues_final_message=True) == expected


def test_earlier_messages_and_tools_are_written_as_always() -> None:
    source = template("hermes")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        {"role": "assistant", "content": "The result"},
    ]
    (expected,), _ = render_jinja_template(
        [chat], chat_template=source, tools=tools, continue_final_message=True, **TOKENS
    )
    found = ChatTemplate(source, TOKENS).prompt(
        chat, tools=tools, add_generation_prompt=False, continues_final_message=True
    )
    assert found == expected
    assert found.endswith("<|assistant|>The result")
