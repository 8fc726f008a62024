"""Unit tests need Python packages only: in their time no process starts, and a heavy library is as if not installed."""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

HEAVY = frozenset({"torch", "triton", "numba", "transformers"})
STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system"})


class Purity:
    """An audit hook, which Python keeps until it ends. It refuses only while a unit test runs."""

    is_asked = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.is_asked:
            return
        if event in STARTS:
            raise RuntimeError(f"a unit test starts no process ({event} {arguments[:2]}): move it to tests/process")
        if event == "import" and arguments[0] in HEAVY:
            raise ModuleNotFoundError(f"a unit test does without {arguments[0]}: move it to tests/process")


UNIT = Path(__file__).parent
PURITY = Purity()
sys.addaudithook(PURITY)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    PURITY.is_asked = item.path.is_relative_to(UNIT)  # pytest asks this hook about all tests
    try:
        return (yield)
    finally:
        PURITY.is_asked = False
