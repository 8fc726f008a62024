"""`itertools.batched` for sequences; the standard library has it from Python 3.12 on."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in order, at most `size` at a time."""
    return (items[first : first + size] for first in range(0, len(items), size))
