"""The parts of a chat answer of a model that calls tools or reasons: deltas of a stream, and whole messages."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from orca.core.domain.request import Request
from orca.core.domain.text import Tokenizer
from orca.gateway.formats.marked_text import Markers
from orca.gateway.formats.parser import AnswerParser
from orca.gateway.formats.parts import AnswerDelta, ToolCallDelta
from orca.gateway.formats.tables import ModelFormats, begins_reasoning, stored_formats


class ChatParts:
    """Divides the answer of one choice, and writes what each token adds."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        formats: ModelFormats,
        *,
        tools: str | None,
        shows_special: bool = False,
        holds_calls: bool = False,
    ) -> None:
        """
        Args:
            tools: JSON: the schema of the parameters by the name of the tool; None if the format needs none.
            shows_special: special tokens have their text.
            holds_calls: for a whole answer, which needs no part before its end.
        """
        reasoning = formats.reasoning
        markers = Markers(formats, tokenizer, shows_special=shows_special)
        self.marker_ids = markers.by_token.keys()  # special tokens that are markers
        self.parser = AnswerParser(
            markers,
            is_in_reasoning=reasoning is not None and begins_reasoning(reasoning, tokenizer, request.prompt),
            schemas=None if tools is None else orjson.loads(tools),
            holds_calls=holds_calls,
        )
        self._request_id = request.id
        self._has_short_ids = formats.tool is not None and formats.tool.short_ids
        self._has_reasoning = reasoning is not None
        self._tokens = 0
        self.reasoning_tokens: int | None = 0 if self._has_reasoning else None

    def push(self, token_id: int, text: str, held: int) -> AnswerDelta:
        """Take the next token. Args: as for `AnswerParser.push`."""
        was_in_reasoning = self.parser.is_in_reasoning
        delta = self.parser.push(token_id, text, held)
        self._tokens += 1
        if was_in_reasoning or self.parser.is_in_reasoning:
            # Reasoning begins with the answer: the tokens of the marker count, too.
            self.reasoning_tokens = self._tokens
        return delta

    def delta(self, delta: AnswerDelta, *, is_first: bool) -> bytes:
        """Write a delta of a stream. Args: is_first: of the choice."""
        fields: dict[str, Any] = {"role": "assistant", "content": None} if is_first else {}
        if delta.reasoning:
            fields |= _reasoning(delta.reasoning)
        if delta.content:
            fields["content"] = delta.content
        if delta.calls:
            fields["tool_calls"] = [self._call_delta(call) for call in delta.calls]
        return orjson.dumps(fields)

    def message(self, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
        """Return the message of a whole answer."""
        content = "".join(delta.content for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        calls = [self._call(call) for delta in deltas for call in delta.calls]
        message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
        if not content and not reasoning and not calls:
            message["content"] = ""
        if self._has_reasoning:
            message |= _reasoning(reasoning or None)
        if calls:
            message["tool_calls"] = calls
        return message

    def ids_of(self, delta: AnswerDelta) -> Iterator[str]:
        """Yield the ids of the tool calls that begin in a delta."""
        return (self._id(call.position) for call in delta.calls if call.name is not None)

    def _call(self, call: ToolCallDelta) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._id(call.position), "type": "function", "function": function}

    def _call_delta(self, call: ToolCallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.position, "function": {"arguments": call.arguments}}
        return {"index": call.position, **self._call(call)}

    def _id(self, position: int) -> str:
        """Return the id of a call: any gateway gives it the same."""
        digest = hashlib.sha256(f"{self._request_id} {position}".encode()).hexdigest()
        return digest[:9] if self._has_short_ids else f"call_{digest[:24]}"


def chat_parts(
    request: Request,
    tokenizer: Tokenizer,
    *,
    tool_format: str | None,
    reasoning_format: str | None,
    tools: str | None,
    shows_special: bool = False,
    holds_calls: bool = False,
) -> ChatParts | None:
    """Return the parts of a choice; None if its answer is one text. Args: as for `stored_formats` and `ChatParts`."""
    formats = stored_formats(tool_format, reasoning_format)
    if formats == ModelFormats():
        return None
    return ChatParts(request, tokenizer, formats, tools=tools, shows_special=shows_special, holds_calls=holds_calls)


def _reasoning(text: str | None) -> dict[str, str | None]:
    """Return reasoning under the name of DeepSeek's API and under vLLM's."""
    return {"reasoning_content": text, "reasoning": text}
