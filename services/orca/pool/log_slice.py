"""A part of a request's log, as it is read and as it is told."""

from dataclasses import dataclass

from orca.core.domain.request import End, Token


@dataclass(frozen=True, slots=True)
class LogSlice:
    """A request's log from an index on."""

    start: int
    tokens: tuple[Token, ...]
    end: End | None  # present only when all its tokens are in the slice or before it
    is_cut: bool = False  # there is more behind the slice, for which this call had no room: read on from there
