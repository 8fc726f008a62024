"""The position from which a stream is resumed: the last event that a client has of each choice.

`0.12,1.7` and `0.end,1.7` name an event of every choice of a call (render.py lists the ids), in any order. `1.start`
stands for a choice without any event yet. `end` alone means that all was read. An empty text means the start.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orca.core.domain.request import End, Token
from orca.gateway.errors import ApiError
from orca.gateway.render.render import ChoiceStream, TokenDetails
from orca.pool.records import RequestStatus

Cursor = Mapping[int, str]
"""Choice -> id of the last event that the client has; without choices of which it has no event."""

HEADER = "Last-Event-ID"
QUERY = "starting_after"
ALL_READ = "end"

# No leading zeros: each event has one name.
_EVENT_ID = re.compile(r"(0|[1-9][0-9]{0,8})\.(?:start|end|0|[1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class ResumePosition:
    """The last events that a client has, as it wrote them."""

    text: str = ""  # empty: it has none
    source: str = HEADER  # the header or the query parameter that holds the text

    @property
    def is_at_end(self) -> bool:
        return self.text.strip() == ALL_READ


def read_position(headers: Mapping[str, str], query: Mapping[str, str]) -> ResumePosition:
    """Read where a stream is to go on. The query parameter counts only where the header is absent or empty."""
    in_header, in_query = headers.get(HEADER), query.get(QUERY)
    return ResumePosition(in_query, QUERY) if in_query and not in_header else ResumePosition(in_header or "")


def parse_cursor(text: str, choices: int, *, source: str = HEADER) -> Cursor:
    """Read the last event of each of `choices` choices; empty for the start.

    Args:
        text: not `ALL_READ`.
        source: the header or query parameter with the text.
    Raises: ApiError 400 that says what is missing or wrong.
    """
    places: dict[int, str] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        event_id = _EVENT_ID.fullmatch(word)
        if event_id is None:
            raise bad_cursor(source, f"{word[:32]!r} is not an event id; examples are 0.12 and 0.end")
        choice = int(event_id[1])
        if choice >= choices:
            raise bad_cursor(source, f"{word} names choice {choice}, but the request has {choices}")
        if choice in places:
            raise bad_cursor(source, f"choice {choice} is named twice")
        places[choice] = word
    missing = [choice for choice in range(choices) if choice not in places]
    if places and missing:
        names = ", ".join(map(str, missing))
        raise bad_cursor(
            source, f"the last event of every choice is needed, or <choice>.start; missing choices: {names}"
        )
    return {choice: word for choice, word in places.items() if not word.endswith(".start")}


def check_written(cursor: Cursor, statuses: Sequence[RequestStatus], *, source: str = HEADER) -> None:
    """Check that a cursor names existing events. Args: statuses: of all choices, in order. Raises: ApiError 400."""
    for choice, event_id in cursor.items():
        status, place = statuses[choice], event_id.partition(".")[2]
        if status.end is None if place == "end" else int(place) >= status.tokens:
            raise bad_cursor(source, f"there is no event {event_id} yet: choice {choice} has {status.tokens} tokens")


def bad_cursor(source: str, message: str) -> ApiError:
    return ApiError(400, f"{source}: {message}", param=source, code="invalid_cursor")


class ResumedChoice:
    """A ChoiceStream without the events that the client has already.

    The text of a token depends on all tokens before it, so the log is still read from its start.
    """

    def __init__(self, stream: ChoiceStream, last_event_id: str) -> None:
        self._stream = stream
        self._last_event_id = last_event_id
        self._is_past = False  # the last event that the client has was passed

    def opening(self) -> bytes:
        return self._stream.opening()

    def failure(self, error: ApiError) -> bytes:
        return self._stream.failure(error)

    def token(self, token: Token) -> bytes:
        """Return the event of the log's next token; empty if the client has it."""
        return self._unless_known(self._stream.token(token))

    def end(self, end: End) -> bytes:
        return self._unless_known(self._stream.end(end))

    def _unless_known(self, event: bytes) -> bytes:
        if self._is_past:
            return event
        self._is_past = self._stream.last_event_id == self._last_event_id
        return b""

    @property
    def details(self) -> TokenDetails:
        """Return the details as ChoiceStream does."""
        return self._stream.details

    @property
    def tokens_to_echo(self) -> int:
        """Tokens as in ChoiceStream: they are rendered even if the client has them."""
        return self._stream.tokens_to_echo

    @property
    def last_event_id(self) -> str:
        """The id of the last event that the client has."""
        return self._stream.last_event_id if self._is_past else self._last_event_id
