"""Philox against the published test vectors of its authors (Random123, kat_vectors)."""

import numpy as np
import pytest

from orca.worker.stage.random_numbers import philox, uniforms

VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert tuple(int(word) for word in words[:, 0]) == expected


def test_the_number_of_a_seed_and_index_is_fixed_and_below_one() -> None:
    largest = 2**63 - 1
    numbers = uniforms([0, 0, 7, largest], [0, 1, 0, largest])
    assert numbers[0] == (0x6627E8D5E169C58D >> 11) * 2.0**-53
    assert len(set(numbers.tolist())) == 4
    assert all(0 <= number < 1 for number in numbers)
