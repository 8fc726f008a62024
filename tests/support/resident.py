"""Memory of this process that is resident in given mappings.

A test that looks at the whole process also counts what is no concern of it: the first call of an operation reads tens
of MiB of library code.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")


def _mappings() -> Iterator[tuple[int, int, str, int]]:
    """Yield first address, end address, file and resident bytes of each mapping (proc(5), `smaps`)."""
    mapping = ("0", "0", "")
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := _MAPPING.fullmatch(line):
            mapping = (found[1], found[2], found[3])
        elif line.startswith("Rss:"):
            yield int(mapping[0], 16), int(mapping[1], 16), mapping[2], int(line.split()[1]) << 10


def resident_bytes_of_file(path: Path) -> int:
    """Return the bytes of a mapped file that are in memory."""
    return sum(resident for _, _, name, resident in _mappings() if name == str(path.resolve()))


def addresses(tensor: torch.Tensor) -> range:
    """Return the addresses of a contiguous tensor in bytes."""
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def resident_bytes_at(*parts: range) -> int:
    """Return the bytes in memory of the mappings that any of these addresses lie in; neighbours may be among them."""
    return sum(
        resident
        for first, end, _, resident in _mappings()
        if any(first < part.stop and part.start < end for part in parts)
    )
