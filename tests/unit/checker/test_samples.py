"""Samples of each part, and the rule for when one counts as steady."""

import os
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest

from checker.history.records import HistoryWriter, Sample
from checker.systems.sampler import Sampler
from checker.systems.system import System

METRICS = 'orca_asyncio_tasks{group="g"} 9.0\norca_other 1.0\n'


class One(System):
    """A system whose one part is this very process."""

    def __init__(self, folder: Path, part: str) -> None:
        super().__init__(folder, ())
        self.part = part

    @property
    def addresses(self) -> dict[str, str]:
        return {"gateway": "one:80", "scheduler-0": "http://one/metrics"}

    def parts(self) -> dict[str, psutil.Process]:
        return {self.part: psutil.Process(os.getpid())}


class Sizes:
    """A Redis that only says how large it is."""

    async def info(self, _: str) -> dict[str, int]:
        return {"used_memory": 2048}

    async def dbsize(self) -> int:
        return 7


async def sample(tmp_path: Path, part: str, *, status: int = 200, **choices: Any) -> Sample:
    def answer(_: httpx.Request) -> httpx.Response:
        if status != 200:
            raise httpx.ConnectError("away")
        return httpx.Response(200, text=METRICS)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        history = HistoryWriter(tmp_path / "history.jsonl")
        sampler = Sampler(One(tmp_path, part), history, http, cast(Any, Sizes()), **choices)
        [found] = await sampler.take()
    return found


@pytest.mark.parametrize("part", ["gateway", "scheduler-0"])
async def test_parts_with_metrics_report_their_tasks(part: str, tmp_path: Path) -> None:
    held = (await sample(tmp_path, part)).held
    assert held["asyncio_tasks"] == 9
    assert held["rss_bytes"] > 1 << 20
    assert {"open_files", "threads", "connections"} <= held.keys()


async def test_redis_reports_its_keys_and_memory(tmp_path: Path) -> None:
    held = (await sample(tmp_path, "redis")).held
    assert (held["keys"], held["used_memory_bytes"]) == (7, 2048)


async def test_a_part_that_does_not_answer_is_sampled_from_outside_alone(tmp_path: Path) -> None:
    held = (await sample(tmp_path, "gateway", status=503)).held
    assert "asyncio_tasks" not in held
    assert "rss_bytes" in held


@pytest.mark.parametrize(
    ("is_quiet", "warm_up_s", "is_steady"), [(True, 0.0, True), (False, 0.0, False), (True, 1e9, False)]
)
async def test_a_sample_is_steady_in_a_quiet_time_of_a_warm_process(
    is_quiet: bool, warm_up_s: float, is_steady: bool, tmp_path: Path
) -> None:
    assert (await sample(tmp_path, "rank-0.0.0", is_quiet=is_quiet, warm_up_s=warm_up_s)).is_steady is is_steady
