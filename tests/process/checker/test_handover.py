"""A system whose parts are handed over from one release to another."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from checker.systems.checkouts import Release, Releases
from checker.systems.layout import PARTS, Layout
from checker.systems.rolling import DEATHS_MAX, RollingSystem
from checker.systems.system import SystemFailure, wait_for

SLEEPS = "import os, time; print(os.environ['PYTHONPATH'], flush=True); time.sleep(300)"


@dataclass(frozen=True, slots=True)
class SmallLayout(Layout):
    """Every part only says of which release it is."""

    def command(self, name: str) -> list[str]:  # noqa: ARG002
        return [sys.executable, "-c", SLEEPS]


class SmallSystem(RollingSystem):
    def _is_ready(self) -> bool:
        return len(self.parts()) == len(PARTS) + 1


@pytest.fixture
def system(tmp_path: Path) -> RollingSystem:
    releases = Releases(Release("one", tmp_path / "one", (1, 1)), Release("two", tmp_path / "two", (1, 2)))
    system = SmallSystem(tmp_path / "system", ("--model", "m"), releases=releases)
    system.layout = SmallLayout(Path("m"), system.folder)
    return system


async def test_a_killed_part_restarts_as_the_same_release(system: RollingSystem) -> None:
    async with system:
        first, log = system.parts()["gateway"], system.log_of("gateway")
        await wait_for(lambda: log.exists() and log.read_text().splitlines(), 60, "its predecessor's first words")
        first.kill()
        await wait_for(lambda: system.parts().get("gateway", first) != first, 60, "the gateway")
        assert "gateway was killed by SIGKILL; started again" in system.output
        await wait_for(lambda: len(log.read_text().splitlines()) == 2, 60, "its first words")
        assert {line.rpartition("/")[0].rpartition("/")[2] for line in log.read_text().splitlines()} == {"one"}


async def test_a_part_that_is_handed_over_runs_the_other_release(system: RollingSystem) -> None:
    async with system:
        await system.hand_over("worker-0.1", system.releases.after)
        log = system.log_of("worker-0.1")
        await wait_for(lambda: "/two/" in log.read_text(), 60, "its first words")
        assert system.release_of("worker-0.1") == system.releases.after
        assert system.release_of("worker-0.0") == system.releases.before
        assert system.output == ""


async def test_a_part_that_cannot_start_ends_the_run_with_its_last_log_lines(system: RollingSystem) -> None:
    async with system:
        for number in range(1, DEATHS_MAX + 1):
            system.parts()["gateway"].kill()
            await wait_for(lambda number=number: system.output.count("gateway") == number, 60, "its end")  # type: ignore[misc]
        with pytest.raises(SystemFailure, match=f"gateway died {DEATHS_MAX} times"):
            system.check_up()
