"""No process outlives its test."""

from collections.abc import Iterator

import pytest

from support.fetch.fetching import FetchProcess


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    while FetchProcess.running:
        FetchProcess.running.pop().kill()
