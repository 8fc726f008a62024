"""Ensures that every message of a chat reaches the prompt, or that the call is refused.

A chat template has branches for the roles of its own model. Many templates pass over a message of any other role, or of
a known role in an unusual place, without an error. The model would then answer without that message.

At load each role is tried once. `developer`, OpenAI's newer name of `system`, becomes `system` unless the template
names it. After rendering, the texts of all messages are looked for in the prompt, which costs one pass over it. A text
that is not there as it was costs a second rendering: a template may write it as JSON, or cut the model's thoughts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from orca.core.domain.errors import InvalidRequest

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

PASSES_MAX = 4
"""Most characters that are searched for the texts of a chat, in lengths of its prompt.

The texts that are left then are taken for missing. So a chat costs time in proportion to its length.
"""

HEAD_CHARACTERS = 32
"""The beginning of a text, which is looked for first."""

# Letters and digits only: a template may write it as JSON, trimmed or in upper case.
_MARK = "orcamark{}end"
_MARKS = re.compile(r"orcamark(\d+)end", re.IGNORECASE)
_TRIED = 0  # number of the mark in the message that is tried

_USER = {"role": "user", "content": "question"}
_ASSISTANT = {"role": "assistant", "content": "answer"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TURNS: Mapping[str, Sequence[tuple[Sequence[Message], Sequence[Message]]]] = {
    "system": [((), (_USER,))],
    "developer": [((), (_USER,))],
    "user": [((), ())],
    "assistant": [((_USER,), ()), ((_USER,), (_USER,))],
    "tool": [((_USER, _ASSISTANT), ()), ((_USER, _CALLING), ())],
    "function": [((_USER, _ASSISTANT), ()), ((_USER, _CALLING), ())],
}
"""Messages before and after the one that is tried, in the orders that templates expect."""


class _Trace(Enum):
    """The treatment that a template gives to the messages of a role."""

    WRITTEN = auto()
    LEFT_OUT = auto()  # it writes a prompt without them
    REFUSED = auto()  # it raises its own error


class MessageRoles:
    """The roles that one template writes."""

    def __init__(self, source: str, render: Render) -> None:
        """Try each role once. Args: source: of the template."""
        traces = {role: _trace(role, render) for role in ROLES}
        self._left_out = frozenset(role for role, trace in traces.items() if trace is _Trace.LEFT_OUT)
        # A template that writes any role's name would write a developer's, which its model has never seen.
        names_developer = "developer" in source and traces["developer"] is _Trace.WRITTEN
        self._maps_developer = not names_developer and traces["system"] is _Trace.WRITTEN

    def write_prompt(self, messages: Sequence[Message], render: Render) -> str:
        """Render a chat. Raises: InvalidRequest naming the first message that is not in the prompt; what `render` does.

        Args: messages: JSON objects with `role` and `content`, which is text.
        """
        known = self._known_to_template(messages)
        for index, message in enumerate(known):
            if message["role"] in self._left_out and message["content"].strip():
                raise _left_out(index, message["role"])
        prompt = render(known)
        _check_calls(known, prompt)
        if missing := _missing(known, prompt):
            for index in sorted(missing - _written_otherwise(known, missing, render)):
                raise _left_out(index, messages[index]["role"])
        return prompt

    def _known_to_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with the roles under which the template writes them."""
        if not self._maps_developer or all(message["role"] != "developer" for message in messages):
            return messages
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def takes_tools(render: Callable[..., str]) -> bool:
    """Return whether a template writes tools. Args: render: `ChatTemplate.render`."""
    name = _MARK.format(_TRIED)
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    function = {"name": name, "description": "Return x.", "parameters": parameters}
    try:
        return name in render((_USER,), tools=[{"type": "function", "function": function}])
    except InvalidRequest:
        return False


def _check_calls(messages: Sequence[Message], prompt: str) -> None:
    """Raises: InvalidRequest naming the first message whose tool calls are not in the prompt."""
    search, found = TextSearch(prompt), set[str]()
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            if name in found:
                continue
            found.add(name)
            # A search that costs too much tells nothing.
            if not search.has(name) and not search.is_spent:
                param = f"messages[{index}].tool_calls"
                raise InvalidRequest(
                    f"{param}: the model's chat template leaves tool calls out of the prompt", param=param
                )


def _trace(role: str, render: Render) -> _Trace:
    tried = {"role": role, "content": _MARK.format(_TRIED), "tool_call_id": _CALL["id"], "name": "f"}
    prompts = []
    for before, after in _TURNS[role]:
        try:
            prompts.append(render([*before, tried, *after]))
        except InvalidRequest:
            continue
    if any(_MARKS.search(prompt) for prompt in prompts):
        return _Trace.WRITTEN
    return _Trace.LEFT_OUT if prompts else _Trace.REFUSED


def _missing(messages: Sequence[Message], prompt: str) -> set[int]:
    """Return the numbers of the messages whose text the prompt does not have as it was."""
    missing: set[int] = set()
    search = TextSearch(prompt)
    for index, message in enumerate(messages):
        text = message["content"].strip()
        if text and not search.has(text):
            missing.add(index)
    return missing


class TextSearch:
    """Looks for the texts of a chat in its prompt, at a cost that the prompt's length bounds."""

    def __init__(self, prompt: str) -> None:
        self.scanned = 0  # characters
        self._prompt = prompt
        self._scanned_max = PASSES_MAX * len(prompt)
        self._position = 0  # the end of the last text that was found

    @property
    def is_spent(self) -> bool:
        """Return whether no more may be searched."""
        return self.scanned >= self._scanned_max

    def has(self, text: str) -> bool:
        """Return whether the prompt has a text. False also if the search would cost too much."""
        # Templates mostly keep the order. A system message may be written first, or with the last question.
        found = self._find(text, self._position, len(self._prompt))
        if found < 0:
            # One that begins later is found already.
            found = self._find(text, 0, min(self._position + len(text) - 1, len(self._prompt)))
        if found >= 0:
            # Also backwards: the texts after this one follow it.
            self._position = found + len(text)
        return found >= 0

    def _find(self, text: str, start: int, end: int) -> int:
        """Return what `prompt.find` does. Python prepares the search of a long text: a comparison takes less time."""
        found = self._scan(text[:HEAD_CHARACTERS], start, end)
        if found < 0:
            return found
        self.scanned += len(text)
        return found if self._prompt.startswith(text, found, end) else self._scan(text, found, end)

    def _scan(self, text: str, start: int, end: int) -> int:
        """Return what `prompt.find` does, and count the characters. -1 also if too few are left of those allowed."""
        left = self._scanned_max - self.scanned
        if left <= 0:
            return -1
        end = min(end, start + left + len(text))
        found = self._prompt.find(text, start, end)
        self.scanned += max(0, (found if found >= 0 else end) - start)
        return found


def _written_otherwise(messages: Sequence[Message], missing: set[int], render: Render) -> set[int]:
    """Return the messages that the template writes, in whatever form. Args: missing: the messages to try."""
    marked = [
        {**message, "content": _MARK.format(index)} if index in missing else message
        for index, message in enumerate(messages)
    ]
    try:
        return {int(number) for number in _MARKS.findall(render(marked))}
    except InvalidRequest:
        # The template reads these texts, so it does not pass over them.
        return missing


def _left_out(index: int, role: str) -> InvalidRequest:
    name = f"messages[{index}].role"
    return InvalidRequest(
        f"{name}: the model's chat template leaves this message of role {role!r} out of the prompt; give its text to "
        "a message of another role",
        param=name,
    )
