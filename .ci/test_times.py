"""Print where the time of a test run went: .ci/test_times.py FILE, a JUnit report as `make test` writes it.

The slowest 30 tests, then the sum of each folder. Times are of setup, call and teardown; several processes share the
work, so sums are longer than the run.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SLOWEST = 30


class Timed(NamedTuple):
    """A test that ran."""

    folder: str
    name: str
    seconds: float


def main(paths: list[str]) -> int:
    if len(paths) != 1 or not Path(paths[0]).exists():
        print(f"test_times: {paths or 'no file'}: give the one report of a run; `make test` writes it", file=sys.stderr)
        return 2
    print("\n".join(lines(read(Path(paths[0])))))
    return 0


def read(report: Path) -> list[Timed]:
    """Every test of a JUnit report."""
    tests = []
    for case in ElementTree.parse(report).iter("testcase"):
        folder, _, file = case.get("classname", "").rpartition(".")
        tests.append(
            Timed(folder.replace(".", "/"), f"{file}.py::{case.get('name', '')}", float(case.get("time", "0")))
        )
    return tests


def lines(tests: list[Timed]) -> list[str]:
    """The table."""
    slowest = sorted(tests, key=lambda test: -test.seconds)[:SLOWEST]
    shown = [f"{test.seconds:8.1f} s  {test.folder}/{test.name}" for test in slowest]
    counts = Counter(test.folder for test in tests)
    seconds = {folder: sum(test.seconds for test in tests if test.folder == folder) for folder in counts}
    sums = [
        f"{taken:8.1f} s  {counts[folder]:5} tests  {folder}"
        for folder, taken in sorted(seconds.items(), key=lambda each: -each[1])
    ]
    total = f"{sum(seconds.values()):8.1f} s  {len(tests):5} tests  in all"
    return [f"The slowest {len(shown)}:", *shown, "", "Each folder:", *sums, total]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
