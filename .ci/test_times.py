"""Print where the time of a test run went: .ci/test_times.py FILE, a JUnit report as `make test` writes it.

The 30 tests that took most, then the sum of each folder: seconds, and seconds of a processor. Times are of setup, call
and teardown. Several processes share the work, so the sums of seconds are longer than the run.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

SLOWEST = 30


class Timed(NamedTuple):
    """A test that ran."""

    folder: str
    name: str
    seconds: float
    cpu_s: float
    """Processor time of the test and its child processes, as tests/support/cpu_times.py measures it."""


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
        properties = {each.get("name"): each.get("value", "0") for each in case.iter("property")}
        tests.append(
            Timed(
                folder=folder.replace(".", "/"),
                name=f"{file}.py::{case.get('name', '')}",
                seconds=float(case.get("time", "0")),
                cpu_s=float(properties.get("cpu_s") or 0),
            )
        )
    return tests


def lines(tests: list[Timed]) -> list[str]:
    """The table."""
    slowest = sorted(tests, key=lambda test: -max(test.seconds, test.cpu_s))[:SLOWEST]
    shown = [f"{_times([test])}  {test.folder}/{test.name}" for test in slowest]
    folders: defaultdict[str, list[Timed]] = defaultdict(list)
    for test in tests:
        folders[test.folder].append(test)
    sums = [
        f"{_times(several)}  {len(several):5} tests  {folder}"
        for folder, several in sorted(folders.items(), key=lambda each: -sum(test.seconds for test in each[1]))
    ]
    total = f"{_times(tests)}  {len(tests):5} tests  in all"
    return [f"The slowest {len(shown)}:", *shown, "", "Each folder:", *sums, total]


def _times(tests: list[Timed]) -> str:
    return f"{sum(test.seconds for test in tests):8.1f} s {sum(test.cpu_s for test in tests):8.1f} s CPU"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
