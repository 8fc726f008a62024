"""The time that people and machines share, which may jump: for what is told or compared between them."""

import time


def wall_clock_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
