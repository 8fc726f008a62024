"""Long lists in parts, as `itertools.batched` makes them from Python 3.12 on."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def batched(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """The items in order, at most so many at a time."""
    return (items[first : first + most] for first in range(0, len(items), most))
