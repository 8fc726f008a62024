"""Bins and periods in which the pool counts the lengths of answers: one rule, in Python and in Lua.

A bin is a range of lengths in tokens (log_bins.py). Lengths below 16 have a bin each. From there on each octave has 8
bins, so a bin is at most an eighth as wide as its lengths.

A period is `PERIOD_MS` of awake time, numbered from 0. Each has counts of its own, which go as a whole after four
hours. The half-life belongs to the reader, who weighs each period by its age (`records.LengthCounts.weighed`). So the
update is one addition. Counts that decay in the pool would need more: if each weight is divided by two with time, an
update or a timer visits all counts. If new answers get growing weights instead (forward decay), the numbers outgrow
their type and all counts are scaled down. Either is a scan during which Redis answers nobody, and fixes one half-life.
Awake time makes clock jumps harmless, and an outage lets no count grow old.
"""

from orca.pool.log_bins import LogBins

PERIOD_MS = 600_000
"""Awake time of one period: ten minutes, a third of the half-life that readers use by default."""

PERIODS_KEPT = 25
"""Periods with counts, the one that runs now included: at least four hours. After four hours and with a half-life of 30
minutes, an answer weighs less than a two hundredth."""

HALF_LIFE_S = 1800
"""Awake seconds after which an answer has half its weight, unless a reader chooses another half-life."""

OWN_ENDS = ("stop", "length")
"""Reasons of the ends that are counted: the answer is whole, or `max_tokens` has cut it. Other ends come from outside
and say nothing about lengths."""

_BINS = LogBins(exact_bits=4)

BIN_MAX = _BINS.bin_of(2**31 - 1)
"""The bin of the longest text that any model reads or writes."""

COUNT_MAX = 2**53
"""Largest count that Redis adds to exactly."""


def bin_of(tokens: int) -> int:
    """Return the bin of a length, 0 or more."""
    return _BINS.bin_of(tokens)


def bounds_of(bin_number: int) -> tuple[int, int]:
    """Return the smallest and the largest length of a bin."""
    return _BINS.bounds_of(bin_number)


def period_of(awake_ms: int) -> int:
    """Return the period that runs at an awake time."""
    return awake_ms // PERIOD_MS


def kept_periods(awake_ms: int) -> range:
    """Return the periods whose counts are kept at an awake time, the newest first."""
    newest = period_of(awake_ms)
    return range(newest, max(-1, newest - PERIODS_KEPT), -1)


def first_of_window(awake_ms: int, window_ms: int) -> int:
    """Return the oldest of the newest periods that make up a window. Args: window_ms: rounded up to whole periods."""
    return period_of(awake_ms) - -(-window_ms // PERIOD_MS) + 1


def age_ms(period: int, awake_ms: int) -> int:
    """Return the awake time since the middle of a period, 0 before it."""
    return max(0, awake_ms - period * PERIOD_MS - PERIOD_MS // 2)


def lua() -> str:
    """Return constants and `bin_of` for the head of each script."""
    ends = ", ".join(f"{reason} = true" for reason in OWN_ENDS)
    constants = f"local PERIOD_MS, PERIODS_KEPT, OWN_ENDS = {PERIOD_MS}, {PERIODS_KEPT}, {{ {ends} }}\n"
    return constants + _BINS.lua("bin_of")
