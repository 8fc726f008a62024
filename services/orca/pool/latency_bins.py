"""Bins in which the pool counts the latencies of answers, and what each latency spans: one rule, in Python and in Lua.

The pool has three times of a request: it was submitted, its first step began, and its first token was committed. The
fourth is that of the commit that ends it. All are of the wall clock of Redis, in whole milliseconds, and are fields of
the request's record. So they outlive every scheduler: a request that was moved, resumed or recovered counts from its
first step ever, the time without an owner included. The first step is known from the commit of the first token. If that
comes under a later claim than the first one, the first claim ever counts as the first step: steps without a token may
have followed it.

A bin is a range of microseconds (log_bins.py). From 64 us on each octave has 32 bins. The middle of a bin is at most
1/64, or 1.6 %, away from its latencies. Latencies from 19 hours on share the last bin. If the clock was set back
between two times, their latency counts as 0.

Periods and ends that count are those of the lengths (length_bins.py).
"""

from enum import StrEnum

from orca.pool.log_bins import LogBins


class AnswerLatency(StrEnum):
    """The latencies of an answer; the order is that of their fields in the pool."""

    SEQUENCE = "sequence"  # first step to end
    REQUEST = "request"  # submission to end
    FIRST_TOKEN = "first_token"  # first step to first token; only answers with a token
    REQUEST_FIRST_TOKEN = "request_first_token"  # submission to first token; the same
    TOKEN = "token"  # first token to end, for each token after the first; only answers with two


LATENCIES = tuple(AnswerLatency)

LATENCY_MAX_US = 2**36 - 1
"""The largest latency that is told apart from larger ones: 19 hours. So each latency has at most 1,024 bins."""

_BINS = LogBins(exact_bits=6)

BIN_MAX = _BINS.bin_of(LATENCY_MAX_US)
"""The last bin."""


def bin_of(latency_us: float) -> int:
    """Return the bin of a latency; a negative one counts as 0."""
    return _BINS.bin_of(int(min(max(latency_us, 0), LATENCY_MAX_US)))


def bounds_of(bin_number: int) -> tuple[int, int]:
    """Return the smallest and the largest latency of a bin, in microseconds."""
    return _BINS.bounds_of(bin_number)


def middle_s(bin_number: int) -> float:
    """Return the latency that stands for those of a bin, in seconds."""
    return sum(bounds_of(bin_number)) / 2e6


def latencies_us(
    *, submitted_ms: int, first_step_ms: int | None, first_token_ms: int | None, ended_ms: int, tokens: int
) -> dict[AnswerLatency, float]:
    """Return the latencies of an answer; those without a time are left out. Args: tokens: of its whole log."""
    spans = {
        AnswerLatency.SEQUENCE: (first_step_ms, ended_ms, 1),
        AnswerLatency.REQUEST: (submitted_ms, ended_ms, 1),
        AnswerLatency.FIRST_TOKEN: (first_step_ms, first_token_ms, 1),
        AnswerLatency.REQUEST_FIRST_TOKEN: (submitted_ms, first_token_ms, 1),
        AnswerLatency.TOKEN: (first_token_ms, ended_ms, tokens - 1),
    }
    return {
        latency: 1000 * (until_ms - from_ms) / parts
        for latency, (from_ms, until_ms, parts) in spans.items()
        if from_ms is not None and until_ms is not None and parts > 0
    }


def lua() -> str:
    """Return `latency_bin_of` for the head of each script."""
    return f"""\
{_BINS.lua("log_bin_of")}
local function latency_bin_of(us) return log_bin_of(math.floor(math.min(math.max(us, 0), {LATENCY_MAX_US}))) end
"""
