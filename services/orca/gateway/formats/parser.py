"""Divides an answer into reasoning, content and calls of tools, while it grows.

The parser is a pure function of the tokens of one output, so any gateway divides an answer alike. White space next to a
marker belongs to nobody. All other text is handed on as the model wrote it. What may still turn out to be a marker is
held back.

A call that is not written as its format wants is content, unchanged. A stream cannot take back what was sent: from the
first character of a call's arguments on, it stays a call, and its arguments are the model's text.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from orca.core.domain.text import Tokenizer
from orca.gateway.formats.readers import CallReader, JsonCallReader, NamedCallReader, TaggedCallReader
from orca.gateway.formats.tables import JsonCall, ModelFormats, NamedCall, TaggedCall, ToolFormat

_FIRST_MARK = 0xD800
"""Special tokens have no text. In the parser's text each marker among them is a character that no text can have."""


@dataclass(slots=True)
class CallDelta:
    """More of one call."""

    position: int  # among the calls of the answer, from 0
    name: str | None  # None if an earlier delta had it
    arguments: str


@dataclass(slots=True)
class AnswerDelta:
    """The parts of an answer that one token makes available."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class _State(Enum):
    START = auto()  # nothing but white space yet: reasoning may begin, or calls without a marker
    REASONING = auto()
    CONTENT = auto()
    BEFORE_CALLS = auto()  # after the marker
    CALL = auto()
    AFTER_CALL = auto()
    AFTER_LIST = auto()


class Markers:
    """The tables of a model with the markers as they stand in the parser's text."""

    def __init__(self, formats: ModelFormats, tokenizer: Tokenizer, *, shows_special: bool = False) -> None:
        """Args: shows_special: a special token that marks nothing has its text."""
        self.by_token: dict[int, str] = {}
        self._texts: dict[str, str] = {}  # of the marks
        self._shows_special = shows_special
        self._special = tokenizer.special_ids
        tool, reasoning = formats.tool, formats.reasoning
        if tool is not None:
            body = tool.body
            if isinstance(body, NamedCall):
                body = replace(body, between=self._shown(body.between))
            tool = replace(tool, begin=self._shown(tool.begin), end=self._shown(tool.end), body=body)
        if reasoning is not None:
            reasoning = replace(reasoning, begin=self._shown(reasoning.begin), end=self._shown(reasoning.end))
        self.formats = ModelFormats(tool, reasoning)

    def _shown(self, marker: str) -> str:
        token_id = self._special.get(marker)
        if token_id is None:
            return marker
        mark = self.by_token.setdefault(token_id, chr(_FIRST_MARK + len(self.by_token)))
        self._texts[mark] = marker if self._shows_special else ""
        return mark

    def visible(self, text: str) -> str:
        """Return a text for the client: without special tokens, or with their texts."""
        for mark, shown in self._texts.items():
            text = text.replace(mark, shown)
        return text


class AnswerParser:
    """Takes the tokens of one output, and returns what each of them adds to reasoning, content and calls.

    A method for each state reads the text that is not assigned yet. This makes it longer than other classes.
    """

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
        self._markers = markers
        self._tool, self._reasoning = markers.formats.tool, markers.formats.reasoning
        self._schemas = schemas or {}
        self._holds_calls = holds_calls
        self._state = _State.REASONING if is_in_reasoning else _State.START
        self._due: deque[tuple[int, str]] = deque()  # special tokens: characters of the text before each, and the mark
        self._length = 0  # characters of the text so far
        self._pending = ""  # text that is not assigned yet
        self._space = ""  # white space that nobody has if a marker follows
        self._follows_marker = is_in_reasoning
        self._raw = ""  # the text of the call that is read, with the marker before it
        self._call: CallReader | None = None
        self._is_announced = False  # the call that is read was sent
        self._delta = AnswerDelta()
        self.calls = 0  # calls that were sent

    @property
    def is_in_reasoning(self) -> bool:
        return self._state is _State.REASONING

    def push(self, token_id: int, text: str, held: int = 0) -> AnswerDelta:
        """Take the next token.

        Args:
            text: that the token makes available.
            held: characters of the output before this token that are not available yet.
        """
        self._delta = AnswerDelta()
        mark = self._markers.by_token.get(token_id)
        if mark is not None:
            self._due.append((self._length + len(text) + held, mark))
        self._pending += self._with_marks(text)
        while self._read():
            pass
        return self._delta

    def flush(self, text: str, *, is_cut: bool) -> AnswerDelta:
        """Return the rest at the end of the output.

        Args:
            text: that was held back.
            is_cut: the model has not ended it: its last call may be a part of one.
        """
        self._delta = AnswerDelta()
        self._pending += self._with_marks(text)
        while self._read():
            pass
        self._end(is_cut)
        return self._delta

    def _with_marks(self, text: str) -> str:
        """Return new text with the special tokens that stand in it."""
        start, self._length = self._length, self._length + len(text)
        if not self._due:
            return text
        parts, taken = [], 0
        while self._due and self._due[0][0] <= self._length:
            offset, mark = self._due.popleft()
            parts += [text[taken : offset - start], mark]
            taken = offset - start
        return "".join([*parts, text[taken:]])

    def _read(self) -> bool:
        """Assign pending text. Returns: whether the state has changed, so that more may be assigned."""
        match self._state:
            case _State.START:
                return self._read_start()
            case _State.REASONING:
                assert self._reasoning is not None
                return self._read_until(self._reasoning.end)
            case _State.CONTENT:
                return self._read_until(None if self._tool is None else self._tool.begin)
            case _State.CALL:
                return self._read_call()
            case _:
                return self._read_between()

    def _read_start(self) -> bool:
        text = self._pending.lstrip()
        reasoning, is_bare = self._reasoning, self._tool is not None and self._tool.may_omit_begin
        if reasoning is not None and text.startswith(reasoning.begin):
            self._pending = text.removeprefix(reasoning.begin)
            self._space, self._follows_marker = "", True
            self._state = _State.REASONING
        elif is_bare and text.startswith("{"):
            self._begin_call(self._pending[: -len(text)])
            self._pending = text
        elif (reasoning is None or not reasoning.begin.startswith(text)) and (text or not is_bare):
            self._state = _State.CONTENT
        else:
            return False
        return True

    def _read_until(self, marker: str | None) -> bool:
        """Write text up to a marker, and go on after it."""
        text, found, rest = (self._pending, "", "") if marker is None else self._pending.partition(marker)
        if not found:
            kept = 0 if marker is None else _overlap(self._pending, marker)
            self._write(text[: len(text) - kept])
            self._pending = text[len(text) - kept :]
            return False
        self._write(text)
        self._pending = rest
        if self._state is _State.REASONING:
            # Reasoning comes once.
            self._reasoning = None
            self._state = _State.START
        else:
            self._raw = self._space + found
            self._state = _State.BEFORE_CALLS
        self._space, self._follows_marker = "", True
        return True

    def _write(self, text: str) -> None:
        """Hand on text of the present state, without white space next to a marker."""
        if self._follows_marker:
            text = text.lstrip()
        if not text:
            return
        self._follows_marker = False
        shown = text.rstrip()
        text, self._space = (self._space + shown, text[len(shown) :]) if shown else ("", self._space + text)
        text = self._markers.visible(text)
        if self._state is _State.REASONING:
            self._delta.reasoning += text
        else:
            self._delta.content += text

    def _read_between(self) -> bool:
        """Read what the format has around calls; any other text is content."""
        tool = self._tool
        assert tool is not None
        is_before, text = self._state is _State.BEFORE_CALLS, self._pending.lstrip()
        if is_before and not tool.is_list:
            self._begin_call(self._raw)
            return True
        wanted = self._wanted_between(tool)
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

    def _wanted_between(self, tool: ToolFormat) -> Mapping[str, _State]:
        """Return the texts that may follow, with the states after them."""
        if self._state is _State.BEFORE_CALLS:
            return {"[": _State.CALL}
        ends = {tool.end: _State.CONTENT} if tool.end else {}
        if self._state is _State.AFTER_LIST:
            return ends
        if tool.is_list:
            return {",": _State.CALL, "]": _State.AFTER_LIST}
        separator = tool.separator.strip()
        return ends | ({separator: _State.CALL} if separator else {})

    def _begin_call(self, raw: str) -> None:
        """Args: raw: the text since the marker, and the marker."""
        self._raw = raw
        self._call = self._reader()
        self._is_announced = False
        self._state = _State.CALL

    def _reader(self) -> CallReader:
        assert self._tool is not None
        match self._tool.body:
            case JsonCall() as body:
                return JsonCallReader(body)
            case NamedCall() as body:
                return NamedCallReader(body)
            case TaggedCall() as body:
                return TaggedCallReader(body, self._schemas)

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None
        taken = call.read(self._pending)
        self._raw += self._pending[:taken]
        self._pending = self._pending[taken:]
        if call.has_failed and (self._holds_calls or call.name is None):
            self._write_broken()
            return True
        is_over = call.is_done or call.has_failed
        if call.name is not None and (is_over or not self._holds_calls):
            self._announce(call, call.name)
        if is_over:
            self._raw, self._space, self._follows_marker = "", "", True
            self._state = _State.AFTER_CALL
        return is_over

    def _announce(self, call: CallReader, name: str) -> None:
        # A special token inside of a call has no text there either.
        arguments, name = self._markers.visible(call.take_arguments()), self._markers.visible(name)
        if not self._is_announced:
            self._is_announced = True
            self._delta.calls.append(CallDelta(self.calls, name, arguments))
            self.calls += 1
        elif arguments:
            self._delta.calls.append(CallDelta(self.calls - 1, None, arguments))

    def _write_broken(self) -> None:
        """Write the text of a call, which is none, as content."""
        self._state = _State.CONTENT
        self._follows_marker = False
        self._write(self._raw)
        self._raw = ""

    def _end(self, is_cut: bool) -> None:
        """Assign what is left."""
        text, self._pending = self._pending, ""
        match self._state:
            case _State.START | _State.CONTENT | _State.REASONING:
                self._write(text)
            case _State.BEFORE_CALLS:
                self._raw += text
                self._write_broken()
            case _State.CALL:
                call = self._call
                if call is not None and call.name is not None and self._holds_calls and is_cut:
                    self._announce(call, call.name)
                elif not self._is_announced:
                    self._raw += text
                    self._write_broken()
        if self._state is _State.REASONING:
            self._delta.reasoning += self._space
        else:
            self._delta.content += self._space
        self._space = ""


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of a text with which the marker begins."""
    return next(
        (length for length in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-length:])), 0
    )
