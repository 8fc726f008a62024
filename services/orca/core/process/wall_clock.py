"""The time that people and machines share. It may jump, so it is only for times that are shown or compared."""

import time


def wall_clock_ms() -> int:
    """Return Unix milliseconds."""
    return time.time_ns() // 1_000_000
