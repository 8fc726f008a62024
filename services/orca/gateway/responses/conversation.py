"""The items of a conversation: those that a stored response was made from, and those that a later one continues.

A stored response keeps its input items, after all items of the responses that it continued. So a conversation goes on
while the record of its last response exists. An item is kept with the fields that this server reads, and no others.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orca.core.domain.errors import InvalidRequest

Item = dict[str, Any]

ID_CHARACTERS_MAX = 64
PAGE_ITEMS, PAGE_ITEMS_MAX = 20, 100
"""Items of one page of a list: by default, and at most."""

_IDS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def kept_items(given: Iterable[Mapping[str, Any]]) -> list[Item]:
    """Return items as they are stored. Args: given: items whose parts `translate` has read."""
    return [_kept(item) for item in given]


def named_items(items: Iterable[Item], name_of_call: str) -> list[Item]:
    """Return items with an id of its own each: the given one, or one made of the call's own name and the place."""
    named: list[Item] = []
    used: set[str] = set()
    for place, item in enumerate(items):
        name = item.get("id")
        if not isinstance(name, str) or not 0 < len(name) <= ID_CHARACTERS_MAX or name in used:
            digest = hashlib.sha256(f"{name_of_call} input {place}".encode()).hexdigest()
            name = f"{_IDS[item['type']]}_{digest[:32]}"
        used.add(name)
        named.append({**item, "id": name})
    return named


def whole_items(output: Iterable[Item]) -> list[Item]:
    """Return the output items that a conversation goes on from: whole ones, and the text of a message that was cut."""
    return kept_items(item for item in output if item["status"] == "completed" or item["type"] == "message")


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a list of items in OpenAI's shape.

    Args: query: `limit`, `order` and `after`, each perhaps absent.
    Raises: InvalidRequest naming the parameter.
    """
    limit, order, after = query.get("limit", str(PAGE_ITEMS)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= PAGE_ITEMS_MAX):
        raise InvalidRequest(f"limit: must be 1 to {PAGE_ITEMS_MAX}, not {limit[:32]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: must be asc or desc, not {order[:32]!r}", param="order")
    ordered = items if order == "asc" else items[::-1]
    names = [item["id"] for item in ordered]
    if after is not None and after not in names:
        raise InvalidRequest(f"after: is the id of no input item: {after[:32]!r}", param="after")
    first = 0 if after is None else names.index(after) + 1
    data = ordered[first : first + int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": first + len(data) < len(ordered),
    }


def _kept(item: Mapping[str, Any]) -> Item:
    kind = item.get("type", "message")
    kept: Item = {"id": item.get("id"), "type": kind}
    if kind in ("function_call", "message"):
        kept["status"] = "incomplete" if item.get("status") == "incomplete" else "completed"
    match kind:
        case "message":
            role = item["role"]
            text_kind = "output_text" if role == "assistant" else "input_text"
            return {**kept, "role": role, "content": _parts(item["content"], text_kind)}
        case "function_call":
            return {**kept, **{name: item.get(name) for name in ("call_id", "name", "arguments")}}
        case "function_call_output":
            output = item["output"]
            parts = output if isinstance(output, str) else _parts(output, "input_text")
            return {**kept, "call_id": item.get("call_id"), "output": parts}
        case _:
            return {**kept, "summary": [], "content": _parts(item.get("content") or [], "reasoning_text")}


def _parts(content: str | Sequence[Mapping[str, Any]], text_kind: str) -> list[Item]:
    """Return the parts of a text. Args: text_kind: the type of a part that has a text."""
    if isinstance(content, str):
        content = [{"type": text_kind, "text": content}]
    annotations: Item = {"annotations": []} if text_kind == "output_text" else {}
    return [
        {"type": "refusal", "refusal": part["refusal"]}
        if part["type"] == "refusal"
        else {"type": text_kind, "text": part["text"], **annotations}
        for part in content
    ]
