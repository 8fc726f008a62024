"""A model's chat template: turns messages into text of the form that the model was trained on.

The Jinja environment is the one for which Hugging Face templates are written. Templates come with the weights and are
not trusted: they run in Jinja's immutable sandbox and see plain JSON values only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orca.core.domain.errors import InvalidRequest, ModelError
from orca.gateway.models.message_roles import MessageRoles, Render, takes_tools

_TEXT_END = "orcaendoftext "
"""Marks the end of the message that is continued."""


class ChatTemplate:
    """A compiled template with the tokenizer's named special tokens."""

    def __init__(self, source: str, named_special_tokens: Mapping[str, str], *, tool_source: str | None = None) -> None:
        """
        Args:
            source: Jinja source.
            tool_source: of a template for chats with tools; None if `source` writes them, too.
        Raises: ModelError if a template is not valid Jinja.
        """
        self._template = _compiled(source)
        self._tool_template = self._template if tool_source is None else _compiled(tool_source)
        self._tokens = dict(named_special_tokens)
        self._roles = MessageRoles(source, self.render)
        self._tool_roles = self._roles if tool_source is None else MessageRoles(tool_source, self._render_for_tools)

    @cached_property
    def takes_tools(self) -> bool:
        """True if the template writes tools into the prompt. It is tried once."""
        return takes_tools(self.render)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continues_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a chat, in which every message is.

        Args:
            continues_final_message: end with the text of the last message, as if its author went on.
            others: as for `render`.
        Raises: InvalidRequest if the template refuses the messages or leaves one out, or for a variable that is ours.
        """
        own = self._variables(messages, tools, add_generation_prompt=add_generation_prompt)
        for name, value in (variables or {}).items():
            if name in own and value not in (None, own[name]):
                name = f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"{name}: this variable cannot be replaced", param=name)
        render = partial(self.render, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)
        if continues_final_message:
            render = partial(_render_open, render)
        return (self._roles if tools is None else self._tool_roles).write_prompt(messages, render)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text, with special tokens written out.

        Args:
            messages: JSON objects with `role` and `content`.
            tools: OpenAI's objects, which the model may call; None for no tools.
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: more variables for the template; they do not replace those of this method.
        Raises: InvalidRequest if the template refuses the messages.
        """
        own = self._variables(messages, tools, add_generation_prompt=add_generation_prompt)
        template = self._template if tools is None else self._tool_template
        try:
            return template.render({**(variables or {}), **own})
        except Exception as error:
            # A template is its author's program: any error that it raises is about these messages.
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error

    def _render_for_tools(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self.render(messages, tools=())

    def _variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> dict[str, Any]:
        return {
            **self._tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }


def _render_open(render: Render, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt up to the end of the last message's text, as `apply_chat_template` of transformers does.

    Raises: InvalidRequest if the template changes the end of the text.
    """
    last = {**messages[-1], "content": messages[-1]["content"] + _TEXT_END}
    prompt = render([*messages[:-1], last])
    before, mark, after = prompt.partition(_TEXT_END.rstrip())
    if not mark or mark in after:
        param = "continue_final_message"
        message = f"{param}: the model's chat template does not write the last message as it is"
        raise InvalidRequest(message, param=param)
    # A template that removes the mark's own space removes it at the end of any text.
    return before if after.startswith(" ") else before.rstrip()


def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training; here its body is plain content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escaping HTML characters, as Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_text: str) -> str:
    # Local time, as authors of templates expect it.
    return datetime.now().strftime(format_text)  # noqa: DTZ005
