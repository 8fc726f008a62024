"""Tests that measure time run while no other does, also where several processes share the work (pytest -n)."""

import fcntl
from collections.abc import Generator
from pathlib import Path

import pytest


class Turns:
    """A pytest plugin of each of the processes. All but one wait while it runs a test that is marked `alone`.

    A test holds the lock on `turn`, together with others, or by itself when it is marked. Whoever wants that lock
    stands at the `gate` first; so one that wants it for itself waits for the tests that run, and for no later ones.
    Between two tests nothing is held: a process may wait there for what another one hands over. The kernel takes the
    locks from a process that dies.
    """

    def __init__(self, gate: Path, turn: Path) -> None:
        """Args: files that are there, each for its lock; nothing is written."""
        self._gate, self._turn = gate.open(), turn.open()

    # Around the timeout of the test, which is for its own time only.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
