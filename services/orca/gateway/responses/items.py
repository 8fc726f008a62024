"""The output items of a response, and the events that make them.

Items follow the parts of the answer: `reasoning`, `message`, `function_call`. Their ids are digests of request and
place, so the events, the final object and any gateway name an item alike.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from orca.gateway.formats.parts import AnswerDelta, ToolCallDelta

Event = tuple[str, dict[str, Any]]
"""The type of an event, and its fields besides `type` and `sequence_number`."""

Logprob = dict[str, Any]
"""A token with its log probability, as OpenAI writes it."""

_IDS = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class OutputItems:
    """Collects the items of one response while its answer grows."""

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._request_id = request_id
        self._is_open = False  # the last item has not ended

    def add(self, delta: AnswerDelta, call_ids: Iterator[str], logprobs: Sequence[Logprob] = ()) -> Iterator[Event]:
        """Yield the events of more of the answer.

        Args:
            call_ids: of the calls that begin in it, in order.
            logprobs: of its content.
        """
        if delta.reasoning:
            yield from self._add_text("reasoning", "reasoning_text", delta.reasoning)
        if delta.content:
            yield from self._add_text("message", "output_text", delta.content, logprobs)
        for call in delta.calls:
            yield from self._add_call(call, call_ids)

    def end(self, *, is_cut: bool) -> Iterator[Event]:
        """Yield the last events. Args: is_cut: the answer has not ended by itself."""
        if not self.items and not is_cut:
            yield from self._add_text("message", "output_text", "")
        yield from self._close("incomplete" if is_cut else "completed")

    def _add_text(self, kind: str, part_type: str, text: str, logprobs: Sequence[Logprob] = ()) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close()
            fields = {"summary": [], "content": []} if kind == "reasoning" else {"role": "assistant", "content": []}
            yield from self._open(kind, fields)
            part = _part(part_type)
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": _copy_of_part(part)}
            self.items[-1]["content"].append(part)
        part = self.items[-1]["content"][0]
        part["text"] += text
        if kind == "message":
            part["logprobs"] += logprobs
        if text:
            delta = {**self._place(), "content_index": 0, "delta": text}
            yield f"response.{part_type}.delta", delta | ({"logprobs": logprobs} if kind == "message" else {})

    def _add_call(self, call: ToolCallDelta, call_ids: Iterator[str]) -> Iterator[Event]:
        if call.name is not None:
            yield from self._close()
            yield from self._open("function_call", {"call_id": next(call_ids), "name": call.name, "arguments": ""})
        self.items[-1]["arguments"] += call.arguments
        if call.arguments:
            yield "response.function_call_arguments.delta", {**self._place(), "delta": call.arguments}

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        digest = hashlib.sha256(f"{self._request_id} item {len(self.items)}".encode()).hexdigest()
        self.items.append({"type": kind, "id": f"{_IDS[kind]}_{digest[:32]}", "status": "in_progress", **fields})
        self._is_open = True
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": _copy(self.items[-1])}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._place(), **arguments}
        else:
            part = item["content"][0]
            where = {**self._place(), "content_index": 0}
            done = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if item["type"] == "message" else {})
            yield f"response.{part['type']}.done", {**where, **done}
            yield "response.content_part.done", {**where, "part": _copy_of_part(part)}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": _copy(item)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _part(part_type: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": part_type, "text": ""}
    return part | ({"annotations": [], "logprobs": []} if part_type == "output_text" else {})


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item that later text does not change."""
    return {**item, "content": list(map(_copy_of_part, item["content"]))} if "content" in item else dict(item)


def _copy_of_part(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "logprobs": list(part["logprobs"])} if "logprobs" in part else dict(part)
