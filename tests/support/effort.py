"""The number of tries of a test for which more examples only find rarer faults."""

import os

IS_FULL = os.environ.get("ORCA_TEST_EFFORT") == "full"
"""`make prove` says so."""


def tries(full: int) -> int:
    """A fifth of the examples or seeded simulations of a test; all of them under `make prove`."""
    return full if IS_FULL else max(1, full // 5)
