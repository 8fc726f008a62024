"""Set how many threads PyTorch computes with, for the length of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """PyTorch computes with so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
