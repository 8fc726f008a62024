"""The parts of an answer, and the white space between them."""

from dataclasses import dataclass, field
from enum import Enum, auto

from orca.gateway.formats.marked_text import MarkedText, Markers


@dataclass(slots=True)
class ToolCallDelta:
    """More of one call."""

    position: int  # among the calls of the answer, from 0
    name: str | None  # None if an earlier delta had it
    arguments: str


@dataclass(slots=True)
class AnswerDelta:
    """The parts of an answer that one token makes available."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    # The place of the content in the text with marks: from its first character to behind its last one.
    start: int = 0
    end: int = 0


class AnswerPart(Enum):
    """The kinds of text in an answer."""

    REASONING = auto()
    CONTENT = auto()


class PartWriter:
    """Writes text into deltas. It leaves out white space next to a marker, which may follow later."""

    def __init__(self, markers: Markers, source: MarkedText, *, follows_marker: bool = False) -> None:
        """
        Args:
            source: of all text.
            follows_marker: the prompt ends in a marker.
        """
        self._source = source
        self._markers = markers
        self._space = ""  # white space that nobody has if a marker follows
        self._follows_marker = follows_marker
        self._at = 0  # characters of the source up to the end of the last text
        self.calls = 0  # calls that were written, or begun
        self.is_in_call = False  # the last one may go on
        self.delta = AnswerDelta()

    def take(self) -> AnswerDelta:
        """Return all that was written since the last time."""
        delta, self.delta = self.delta, AnswerDelta()
        return delta

    def write(self, part: AnswerPart, text: str, ahead: int) -> None:
        """Write text. Args: ahead: characters of the source from the first one of the text on."""
        self._at = self._source.length - ahead + len(text)
        if self._follows_marker:
            text = text.lstrip()
        if not text:
            return
        self._follows_marker = False
        shown = text.rstrip()
        text, self._space = (self._space + shown, text[len(shown) :]) if shown else ("", self._space + text)
        self._add(part, text, self._at - len(self._space))

    def mark(self) -> str:
        """Take note of a marker. Returns: the white space before it, which belongs to nobody."""
        space, self._space = self._space, ""
        self._follows_marker = True
        return space

    def end_mark(self) -> None:
        """Let white space after a marker belong to the text that follows."""
        self._follows_marker = False

    def write_unchanged(self, part: AnswerPart, text: str, ahead: int) -> None:
        """Write text that has turned out to be no tool call."""
        self.end_mark()
        self.write(part, text, ahead)

    def write_call(self, name: str, arguments: str) -> None:
        """Write more of the present call: its name first, if it is a new one."""
        # A special token inside of a call has no text there either.
        arguments, name = self._markers.visible(arguments), self._markers.visible(name)
        if self.is_in_call and not arguments:
            return
        self.calls += not self.is_in_call
        self.delta.calls.append(ToolCallDelta(self.calls - 1, None if self.is_in_call else name, arguments))
        self.is_in_call = True

    def end(self, part: AnswerPart) -> None:
        """Write white space at the end of the answer."""
        self._add(part, self._space, self._at)
        self._space = ""

    def _add(self, part: AnswerPart, text: str, end: int) -> None:
        """Args: end: of the text, in the source."""
        shown, delta = self._markers.visible(text), self.delta
        if part is AnswerPart.REASONING:
            delta.reasoning += shown
        elif shown:
            delta.start = delta.start if delta.content else end - len(text)
            delta.end = end
            delta.content += shown
