"""Templates are written as transformers would write them, and cannot leave their sandbox."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from orca.core.domain.errors import InvalidRequest, ModelError
from orca.gateway.models.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "Grüße 🐋"},
    {"role": "assistant", "content": "ok "},
    {"role": "user", "content": "go"},
]
TEMPLATES = {
    "chatml": """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "blocks and lines": """{{ bos_token }}
{% for message in messages %}
    {% if message.role == 'system' %}
  [{{ message.content | trim }}]
    {% else %}
{{ message.role | upper }}: {{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
""",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }} {% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}",
    "tools": "{% if tools %}tools{% endif %}{% if documents %}documents{% endif %}{{ unknown }}.",
    "variables": "{% if thinking is defined and thinking %}think{% endif %}{{ messages[-1].content }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_template_renders_the_same_text_as_transformers(name: str, add_generation_prompt: bool) -> None:
    source, variables = TEMPLATES[name], {"thinking": True}
    (expected,), _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=add_generation_prompt, **TOKENS, **variables
    )
    found = ChatTemplate(source, TOKENS).render(
        MESSAGES, add_generation_prompt=add_generation_prompt, variables=variables
    )
    assert found == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{{ raise_exception('no') }}",
        "{{ 1 + messages }}",
        "{{ 1 // 0 }}",
        "{{ range(10**9) | list }}",
        "{% include 'x' %}",
    ],
)
def test_a_forbidden_template_operation_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses") as error:
        ChatTemplate(source, TOKENS).render(MESSAGES)
    assert error.value.param == "messages"


def test_a_broken_template_stops_the_start_with_its_line() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("a\n{% if %}", TOKENS)


@pytest.mark.parametrize("variables", [{"messages": []}, {"bos_token": "x"}, {"add_generation_prompt": False}])
def test_a_callers_variables_do_not_replace_ours(variables: dict[str, Any]) -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}{{ add_generation_prompt }}", TOKENS)
    assert template.render(MESSAGES, variables=variables) == "<s>4True"
