"""Divides an answer into reasoning, content and tool calls, while it grows.

The parser is a pure function of the tokens of one output, so any gateway divides an answer alike. White space next to a
marker belongs to nobody, unless the answer has a form that may begin with some. All other text is handed on as the
model wrote it. What may still turn out to be a marker is held back.

A call that is not written as its format wants is content, unchanged. A stream cannot take back what was sent: from the
first character of a call's arguments on, it stays a call, and its arguments are the model's text.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from orca.gateway.formats.marked_text import MarkedText, Markers
from orca.gateway.formats.parts import AnswerDelta, AnswerPart, PartWriter
from orca.gateway.formats.readers import ToolCallReader, overlap, reader_of
from orca.gateway.formats.tables import ToolFormat

SPACE_MAX = 4096
"""Most characters of white space between a marker and what belongs to it. More is content."""


class _State(Enum):
    START = auto()  # nothing but white space yet: reasoning may begin, or calls without a marker
    REASONING = auto()
    AFTER_REASONING = auto()  # before the white space between reasoning and answer
    CONTENT = auto()
    BEFORE_CALLS = auto()  # after the marker
    CALL = auto()
    AFTER_CALL = auto()
    AFTER_LIST = auto()


_AROUND = frozenset({_State.AFTER_REASONING, _State.AFTER_CALL, _State.AFTER_LIST})
_IN_CALL = frozenset({_State.BEFORE_CALLS, _State.CALL})


class AnswerParser:
    """Takes the tokens of one output, and returns what each of them adds to reasoning, content and calls."""

    def __init__(
        self,
        markers: Markers,
        *,
        is_in_reasoning: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        holds_calls: bool = False,
    ) -> None:
        """
        Args:
            is_in_reasoning: the prompt ends in the marker with which reasoning begins.
            schemas: of the parameters of each tool, for formats that write no types.
            holds_calls: a call comes at its end, when it is known that all of it is as its format wants.
        """
        self._tool, self._reasoning = markers.formats.tool, markers.formats.reasoning
        self._schemas, self._holds_calls = schemas or {}, holds_calls
        self._state = _State.REASONING if is_in_reasoning else _State.START
        self._text = MarkedText(markers)
        goes_on = self._reasoning is not None and self._reasoning.is_open
        self._writer = PartWriter(markers, self._text, follows_marker=is_in_reasoning and not goes_on)
        self._pending = ""  # text that is not assigned yet
        self._raw = ""  # the text of the call that is read, with the marker before it
        self._call: ToolCallReader | None = None

    @property
    def calls(self) -> int:
        """The calls that were sent."""
        return self._writer.calls

    @property
    def is_in_reasoning(self) -> bool:
        return self._state is _State.REASONING

    def push(self, token_id: int, text: str, held: int = 0) -> AnswerDelta:
        """Take the next token.

        Args:
            text: that the token makes available.
            held: characters of the output before this token that are not available yet.
        """
        self._pending += self._text.push(token_id, text, held)
        while self._read():
            pass
        return self._writer.take()

    def flush(self, text: str, *, is_cut: bool) -> AnswerDelta:
        """Return the rest at the end of the output.

        Args:
            text: that was held back.
            is_cut: the model has not ended it: its last call may be a part of one.
        """
        self._pending += self._text.add(text)
        while self._read():
            pass
        self._end(is_cut)
        return self._writer.take()

    def _read(self) -> bool:
        """Assign pending text. Returns: whether the state has changed, so that more may be assigned."""
        match self._state:
            case _State.START:
                return self._read_start()
            case _State.REASONING:
                assert self._reasoning is not None
                return self._read_until(self._reasoning.end)
            case _State.AFTER_REASONING:
                return self._read_break()
            case _State.CONTENT:
                return self._read_until(None if self._tool is None else self._tool.begin)
            case _State.CALL:
                return self._read_call()
            case _:
                return self._read_between()

    def _read_start(self) -> bool:
        text = self._pending.lstrip()
        reasoning, is_bare = self._reasoning, self._tool is not None and self._tool.may_omit_begin
        is_far = len(self._pending) - len(text) > SPACE_MAX
        if not is_far and reasoning is not None and text.startswith(reasoning.begin):
            self._pending = text.removeprefix(reasoning.begin)
            self._writer.mark()
            self._state = _State.REASONING
        elif not is_far and is_bare and text.startswith("{"):
            self._begin_call(self._pending[: -len(text)])
            self._pending = text
        elif is_far or ((reasoning is None or not reasoning.begin.startswith(text)) and (text or not is_bare)):
            self._state = _State.CONTENT
        else:
            return False
        return True

    def _read_until(self, marker: str | None) -> bool:
        """Write text up to a marker, and go on after it."""
        text, found, rest = (self._pending, "", "") if marker is None else self._pending.partition(marker)
        if not found:
            kept = 0 if marker is None else overlap(self._pending, marker)
            self._writer.write(_part(self._state), text[: len(text) - kept], len(self._pending))
            self._pending = text[len(text) - kept :]
            return False
        self._writer.write(_part(self._state), text, len(self._pending))
        self._pending = rest
        space = self._writer.mark()
        if self._state is _State.REASONING:
            self._state = _State.AFTER_REASONING
        else:
            self._raw = space + found
            self._state = _State.BEFORE_CALLS
        return True

    def _read_break(self) -> bool:
        """Go on after reasoning, which comes once. If the answer is exact, leave out only what belongs between them."""
        assert self._reasoning is not None
        between = self._reasoning.space
        if self._reasoning.is_exact:
            if self._pending != between and between.startswith(self._pending):
                return False
            self._pending = self._pending.removeprefix(between)
            self._writer.end_mark()
        self._reasoning = None
        self._state = _State.START
        return True

    def _read_between(self) -> bool:
        """Read what the format has around calls; any other text is content."""
        tool = self._tool
        assert tool is not None
        is_before, text = self._state is _State.BEFORE_CALLS, self._pending.lstrip()
        if is_before and not tool.is_list:
            self._begin_call(self._raw)
            return True
        wanted = {} if len(self._pending) - len(text) > SPACE_MAX else _wanted_around_calls(self._state, tool)
        for part, state in wanted.items():
            if text.startswith(part):
                self._raw += self._pending[: len(self._pending) - len(text)] + part
                self._pending = text.removeprefix(part)
                if state is _State.CALL:
                    self._begin_call(self._raw if is_before else part)
                self._state = state
                return True
        if any(part.startswith(text) for part in wanted):
            return False
        if is_before:
            self._write_broken()
        self._state = _State.CONTENT
        return True

    def _begin_call(self, raw: str) -> None:
        """Args: raw: the text since the marker, and the marker."""
        self._raw = raw
        assert self._tool is not None
        self._call = reader_of(self._tool.body, self._schemas)
        self._writer.is_in_call = False
        self._state = _State.CALL

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None
        taken = call.read(self._pending)
        self._raw += "" if self._writer.is_in_call else self._pending[:taken]
        self._pending = self._pending[taken:]
        if call.has_failed and (self._holds_calls or call.name is None):
            self._write_broken()
            return True
        is_over = call.is_done or call.has_failed
        if call.name is not None and (is_over or not self._holds_calls):
            self._writer.write_call(call.name, call.take_arguments())
        if is_over:
            self._writer.mark()
            self._state = _State.AFTER_CALL
        return is_over

    def _write_broken(self) -> None:
        """Write the text of a call, which is none, as content."""
        self._state = _State.CONTENT
        self._writer.write_unchanged(AnswerPart.CONTENT, self._raw, len(self._raw) + len(self._pending))

    def _end(self, is_cut: bool) -> None:
        """Assign what is left. Without its end, a part of a marker or of the head of a call is nothing."""
        text, self._pending = self._pending, ""
        name = self._call.name if self._call is not None and self._state is _State.CALL else None
        match self._state:
            case _State.CONTENT if is_cut and self.calls and self._tool and self._tool.begin.startswith(text.strip()):
                pass
            case state if is_cut and (state in _AROUND or (state in _IN_CALL and name is None)):
                pass
            case _State.BEFORE_CALLS | _State.CALL if name is None or (self._holds_calls and not is_cut):
                self._raw += text
                self._write_broken()
            case _State.CALL if is_cut and self._call is not None and name is not None:
                self._call.cut()
                self._writer.write_call(name, self._call.take_arguments())
            case _State.CALL:
                pass  # a stream has sent it
            case _:
                self._writer.write(_part(self._state), text, len(text))
        self._writer.end(_part(self._state))


def _part(state: _State) -> AnswerPart:
    return AnswerPart.REASONING if state is _State.REASONING else AnswerPart.CONTENT


def _wanted_around_calls(state: _State, tool: ToolFormat) -> Mapping[str, _State]:
    """Return the texts that may follow around calls, with the states after them."""
    if state is _State.BEFORE_CALLS:
        return {"[": _State.CALL}
    ends = {tool.end: _State.CONTENT} if tool.end else {}
    if state is _State.AFTER_LIST:
        return ends
    if tool.is_list:
        return {",": _State.CALL, "]": _State.AFTER_LIST}
    separator = tool.separator.strip()
    return ends | ({separator: _State.CALL} if separator else {})
