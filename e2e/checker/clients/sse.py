"""Parses server-sent events from bytes as they arrive."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RawEvent:
    """The id and the data of an event."""

    id: str | None
    data: str


class EventParser:
    """Returns whole events for the bytes that it gets. An incomplete event is stored, and dropped if no more comes.

    A block without data is no event: a gateway whose client waits long sends a comment.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[RawEvent]:
        *blocks, self._rest = (self._rest + chunk).split(b"\n\n")
        events = (_read(block) for block in blocks)
        return [event for event in events if event is not None]


def _read(block: bytes) -> RawEvent | None:
    name: str | None = None
    data: list[str] = []
    for line in block.decode().split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            name = value
        elif field == "data":
            data.append(value)
    return RawEvent(name, "\n".join(data)) if data else None
