"""Counter-based random numbers: the number of (seed, index) is a function of the two, not of earlier numbers.

The generator is Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The seed's 64
bits are the key, the index is the counter, and the first 53 bits of the result make a double in [0, 1). So a token's
random number is the same in any batch, on any stage layout, and after a restart.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ROUNDS = 10


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Compute ten rounds of Philox4x32.

    Args:
        counter: [4, n] of 32-bit words.
        key: [2, n] of 32-bit words.
    Returns: [4, n] of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> _WORD) ^ c1 ^ k0, product1 & _LOW, (product0 >> _WORD) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index), both below 2^63."""
    seed, index = np.array(seeds, dtype=np.uint64), np.array(indices, dtype=np.uint64)
    zero = np.zeros_like(index)
    words = philox(np.stack((index & _LOW, index >> _WORD, zero, zero)), np.stack((seed & _LOW, seed >> _WORD)))
    bits = (words[0] << _WORD | words[1]) >> np.uint64(64 - 53)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
