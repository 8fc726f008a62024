"""The priority of a call: the numbers that a client may write, and the weight that the pool stores for one.

A lower number is more urgent, as in vLLM. One step doubles or halves the weight of a request.
"""

import math

MOST_URGENT_PRIORITY, DEFAULT_PRIORITY, LEAST_URGENT_PRIORITY = -8, 0, 8


def weight_of(priority: int) -> float | None:
    """Return the weight of a request as `Request.weight` has it: 2^-priority, None for the default priority."""
    return None if priority == DEFAULT_PRIORITY else 2.0**-priority


def priority_of(weight: float | None) -> int:
    """Return the priority that a weight was made from: the inverse of `weight_of`."""
    return DEFAULT_PRIORITY if weight is None else round(-math.log2(weight))
