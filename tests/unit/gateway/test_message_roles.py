"""Every message of a chat reaches the prompt or the call is refused, under templates of eighteen kinds."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from orca.core.domain.errors import InvalidRequest
from orca.gateway.models import message_roles
from orca.gateway.models.chat_template import ChatTemplate
from orca.gateway.models.message_roles import PASSES_MAX, ROLES, MessageRoles, TextSearch
from support.gateway.chat_templates import CHAT_TEMPLATES
from support.gateway.gateway_rig import rig, tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXT = 'answer in French, my "friend"\'s way'
USER, ASSISTANT = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
PLACES: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "first": lambda one: [one, USER],
    "last": lambda one: [USER, ASSISTANT, one],
    "alone": lambda one: [one],
    "in the middle": lambda one: [USER, one, ASSISTANT, USER],
    "after a system message": lambda one: [{"role": "system", "content": "be brief"}, one, USER],
    "before a system message": lambda one: [one, {"role": "system", "content": "be brief"}, USER],
}
KNOWN = ("chatml", "qwen2.5", "qwen3", "llama 2", "llama 3", "llama 3.1", "mistral 0.3", "phi 4", "zephyr", "vicuna")
KNOWN += ("deepseek r1", "command r", "gpt-oss", "granite", "openchat")


def template(name: str) -> ChatTemplate:
    return ChatTemplate(CHAT_TEMPLATES[name], TOKENS)


def has_text(prompt: str, text: str = TEXT) -> bool:
    return text in prompt or text.replace('"', '\\"') in prompt


def test_there_are_eighteen_templates() -> None:
    assert len(CHAT_TEMPLATES) == 18


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_message_of_each_role_in_each_place_is_in_the_prompt_or_refused_by_name(name: str) -> None:
    one, written = template(name), 0
    for role, place in itertools.product(ROLES, PLACES):
        messages = PLACES[place]({"role": role, "content": TEXT})
        try:
            prompt = one.prompt(messages)
        except InvalidRequest as error:
            assert (error.param or "").startswith("messages"), (role, place)  # noqa: PT017
            continue
        assert all(has_text(prompt, message["content"]) for message in messages), (role, place)
        written += 1
    assert written >= 2


@pytest.mark.parametrize("name", KNOWN)
def test_a_developer_is_the_system_where_the_template_knows_a_system(name: str) -> None:
    chat = [{"role": "developer", "content": TEXT}, USER]
    prompt = template(name).prompt(chat)
    assert has_text(prompt)
    assert prompt == template(name).render([{"role": "system", "content": TEXT}, USER])


def test_a_developer_keeps_its_name_under_a_template_that_knows_it() -> None:
    both = "{% for m in messages %}{% if m.role in ('system', 'developer') %}[{{ m.role }}] {{ m.content }}{% endif %}"
    chat = [{"role": "developer", "content": TEXT}]
    assert ChatTemplate(both + "{% endfor %}", TOKENS).prompt(chat) == f"[developer] {TEXT}"


@pytest.mark.parametrize(
    ("name", "messages", "index", "role"),
    [
        ("phi 3", [{"role": "system", "content": "x"}, USER], 0, "system"),
        ("phi 3", [{"role": "developer", "content": "x"}, USER], 0, "developer"),
        ("qwen2.5", [USER, {"role": "function", "content": "x"}], 1, "function"),
        ("zephyr", [USER, ASSISTANT, {"role": "tool", "content": "42 degrees"}], 2, "tool"),
        ("deepseek r1", [{"role": "developer", "content": "first"}, {"role": "system", "content": "second"}], 0, "de"),
        ("gpt-oss", [USER, {"role": "system", "content": "be brief"}], 1, "system"),
        ("mistral 0.3", [{"role": "system", "content": "be brief"}, USER, ASSISTANT], 0, "system"),
    ],
)
def test_the_message_that_a_template_leaves_out_is_named(
    name: str, messages: list[dict[str, Any]], index: int, role: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"messages\\[{index}\\].role: .* of role '{role}") as error:
        template(name).prompt(messages)
    assert error.value.param == f"messages[{index}].role"


@pytest.mark.parametrize(
    ("name", "content", "written"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nso", "so<|im_end|>"),
        ("qwen3", "<think>\nhm\n</think>", "assistant\n<|im_end|>"),
        ("deepseek r1", "<think>hm</think>so", "<|Assistant|>so"),
        ("llama 3", "  so \n", "\n\nso<|eot_id|>"),
        ("chatml", "", "assistant\n<|im_end|>"),
    ],
)
def test_a_text_that_the_template_changes_is_no_reason_to_refuse(name: str, content: str, written: str) -> None:
    assert written in template(name).prompt([USER, {"role": "assistant", "content": content}, USER])


def test_an_ordinary_chat_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("chatml", "qwen2.5", "llama 2", "mistral 0.3"):
        one, count = template(name), 0
        inner = one._template.render

        def render(given: Any, inner: Any = inner) -> str:
            nonlocal count
            count += 1
            text: str = inner(given)
            return text

        monkeypatch.setattr(one._template, "render", render)
        one.prompt([{"role": "system", "content": "be brief"}, *[USER, ASSISTANT] * 20, USER])
        assert count == 1


def test_many_changed_texts_cost_one_rendering_more_and_one_that_is_left_out_is_still_found() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' or loop.first %}{{ m.content | tojson }}{% endif %}{% endfor %}"
    )
    one = ChatTemplate(source, TOKENS)
    quoted = [{"role": "user", "content": f'"{n}"'} for n in range(12)]
    assert one.prompt(quoted) == "".join(f'"\\"{n}\\""' for n in range(12))
    with pytest.raises(InvalidRequest) as error:
        one.prompt([*quoted, {"role": "system", "content": "be"}])
    assert error.value.param == f"messages[{12}].role"


def scanned(prompt: str, texts: list[str]) -> tuple[float, bool]:
    """Characters that a search scans, in lengths of the prompt, and whether it has found all texts."""
    search = TextSearch(prompt)
    found = [search.has(text) for text in texts]
    return search.scanned / len(prompt), all(found)


def test_a_text_that_is_found_too_late_makes_no_search_of_the_rest_expensive() -> None:
    # The template cuts the thoughts of the first message, and the last one has the same text.
    thought = "<think>q</think>END"
    chat = [{"role": "assistant", "content": thought}]
    chat += [{"role": "user", "content": f"question {n} of many"} for n in range(1000)]
    chat.append({"role": "user", "content": thought})
    prompt = template("qwen3").prompt(chat)
    assert prompt.count(thought) == 1
    lengths, has_all = scanned(prompt, [message["content"] for message in chat])
    assert has_all
    assert lengths < 4


@pytest.mark.parametrize("order", ["reversed", "from both ends", "all missing"])
def test_no_order_of_texts_costs_more_than_some_passes_over_the_prompt(order: str) -> None:
    texts = [f"text {n:04} of many" for n in range(2000)]
    prompt = "\n".join(texts)
    if order == "reversed":
        texts.reverse()
    elif order == "from both ends":
        texts = [text for pair in zip(texts, reversed(texts), strict=True) for text in pair]
    else:
        texts = [text + "!" for text in texts]
    lengths, has_all = scanned(prompt, texts)
    assert lengths < PASSES_MAX + 0.1
    assert not has_all  # the budget is spent


@pytest.mark.parametrize("step", [1, -1])
def test_thousands_of_tool_calls_cost_some_passes_over_the_prompt(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[TextSearch] = []

    class Noted(TextSearch):
        def __init__(self, prompt: str) -> None:
            super().__init__(prompt)
            searches.append(self)

    monkeypatch.setattr(message_roles, "TextSearch", Noted)
    functions: list[dict[str, Any]] = [{"name": f"f{n:04}", "arguments": {}} for n in range(2000)]
    calls = [{"type": "function", "function": function} for function in functions]
    prompt = "".join(function["name"] + "x" * 500 for function in functions[::step])
    roles = MessageRoles("", lambda _: prompt)
    assert roles.write_prompt([{"role": "assistant", "content": "", "tool_calls": calls}], lambda _: prompt) == prompt
    assert 0 < max(search.scanned for search in searches) < (PASSES_MAX + 0.1) * len(prompt)


@pytest.mark.parametrize("variable", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_a_variable_that_could_not_take_effect_is_refused(variable: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        template("chatml").prompt([USER], variables={variable: "x"})
    assert error.value.param == f"chat_template_kwargs.{variable}"
    own = {"add_generation_prompt": True, "tools": None, "bos_token": "<s>", "enable_thinking": False}
    assert template("chatml").prompt([USER], variables=own) == template("chatml").prompt([USER])


async def test_a_call_is_mapped_or_refused() -> None:
    chat = [{"role": "developer", "content": TEXT}, USER]
    async with rig(chat_template=CHAT_TEMPLATES["qwen2.5"]) as one:
        found = (await one.post("/tokenize", messages=chat)).json()
        assert f"<|im_start|>system\n{TEXT}" in tokenizer().decode(found["tokens"], skip_special_tokens=False)
        await one.chat(messages=chat)
        for path in ("/tokenize", "/v1/chat/completions"):
            status, error = await one.error(path, messages=[*chat, {"role": "function", "content": "x"}])
            assert (status, error["param"], error["code"]) == (400, "messages[2].role", "invalid_value")
