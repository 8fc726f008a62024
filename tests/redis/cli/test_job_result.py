"""`orca plan` as a Job of the operator: it reads the lengths of a pool on Redis, and leaves its result there."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca.cli.job_result import ResultSettings, keep_result
from orca.cli.main import main
from orca.core.domain.errors import SettingError
from orca.core.domain.request import FinishReason
from orca.core.job_files import (
    PLAN_FILE,
    PROFILE_FILE,
    REPORT_FILE,
    SHORTFALL_FILE,
    SUMMARY_FILE,
    read_files,
)
from orca.core.plan_report import read_report
from orca.operator.domain.slo.planned import read_planned
from orca.planner.profile.measuring.measure import MeasurePlan, Report
from orca.planner.profile.measuring.model_key import fewest_heads
from orca.planner.profile.profile import Profile, to_json
from orca.planner.search.plan import read_plan
from orca.pool.contract import RESULT_BYTES_MAX
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import open_redis_pool
from support.planner.profiles import profile
from support.pool.beds import SETTINGS, RedisBed, entry, started


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRedis]:
    """A Redis, in a folder with a profile, which is the present one."""
    (tmp_path / "profile.json").write_bytes(to_json(profile()))
    monkeypatch.chdir(tmp_path)
    with EmbeddedRedis(tmp_path / "redis") as found:
        yield found


def result(redis: EmbeddedRedis, key: str, deployment: str = "orca") -> dict[str, str]:
    async def read() -> bytes | None:
        pool = await open_redis_pool(redis.url, deployment, SETTINGS)
        try:
            return await pool.result(key)
        finally:
            await pool.close()

    body = asyncio.run(read())
    return {} if body is None else read_files(body)


def plan(redis: EmbeddedRedis, *flags: str, deployment: str = "orca") -> int:
    words = ["--strategies", "iteration", "--stages", "2", "--pool", redis.url, "--deployment", deployment]
    return main(["plan", "--profile", "profile.json", *words, "--result-key", "plan-1", *flags])


def test_a_plan_is_left_in_the_pool_as_the_operator_reads_it(redis: EmbeddedRedis) -> None:
    assert plan(redis, "--workload", "8:40/2:20", "--latency-ms", "3000", "--max-batch-size", "3") == 0
    files = result(redis, "plan-1")
    made = read_plan(Path("plan.json"))
    assert (files[PLAN_FILE], files[SUMMARY_FILE]) == (Path("plan.json").read_text(), made.describe())
    planned = read_planned(files)
    assert (planned.layers, planned.policy, planned.shortfall) == (made.schedule.layers, "iteration", None)
    assert planned.max_batch_size == made.schedule.bounds.max_batch_size == 3
    report = read_report(files[REPORT_FILE])
    assert (report.is_new, report.is_met, report.reason) == (True, True, "it is the first plan")
    assert report.lengths == report.planned_lengths
    assert (report.lengths.answers, report.lengths.output_p99) == (0, 20)
    assert report.predicted is not None
    assert report.predicted.throughput == made.predicted.throughput


def test_a_job_whose_plan_meets_no_bound_has_done_its_work(redis: EmbeddedRedis) -> None:
    assert plan(redis, "--workload", "8:40/2:20", "--latency-ms", "1") == 0
    files = result(redis, "plan-1")
    assert files[SHORTFALL_FILE] == read_plan(Path("plan.json")).shortfall()
    assert read_planned(files).shortfall == files[SHORTFALL_FILE]


def test_a_profile_is_left_in_the_pool(redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[MeasurePlan] = []

    def measured(order: MeasurePlan, _: Report) -> Profile:
        wanted.append(order)
        return profile()

    monkeypatch.setattr("orca.cli.whole_profile.measure", measured)
    words = [
        "--out",
        "new.json",
        "--devices",
        "64",
        "--host",
        "false",
        "--pool",
        redis.url,
        "--result-key",
        "profile-1",
    ]
    assert main(["profile", "--model", "orca-austen", *words]) == 0
    assert result(redis, "profile-1") == {PROFILE_FILE: Path("new.json").read_text()}
    assert Path("new.json").read_bytes() == to_json(profile())
    assert wanted[0].ranks[-1] <= fewest_heads(wanted[0].model) < 64


async def end_answers(url: str, number: int) -> str:
    """Let a deployment end so many answers. Returns: its name."""
    bed = RedisBed(url, SETTINGS)
    _, owned = await started(bed, *(f"r{each}" for each in range(number)), prompt=(1,) * 10, max_new_tokens=5)
    await bed.pool.commit([entry(each, 0, 1, 2, 3, end=FinishReason.STOP) for each in owned.values()])
    await bed.close()
    return bed.deployment


@pytest.mark.parametrize(("number", "code"), [(0, 2), (100, 2)])
def test_fewer_than_200_counted_answers_make_no_plan(
    redis: EmbeddedRedis, number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = asyncio.run(end_answers(redis.url, number)) if number else "new"
    assert plan(redis, "--counted", "--latency-ms", "9000", deployment=deployment) == code
    assert (
        f"the pool has counted {number} answers in the last four hours, and a plan needs 200" in capsys.readouterr().err
    )
    assert result(redis, "plan-1", deployment) == {}


def test_a_plan_is_made_for_the_answers_that_a_pool_has_counted(
    redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orca.cli.plan.ANSWERS_MIN", 100)
    deployment = asyncio.run(end_answers(redis.url, 100))
    assert plan(redis, "--counted", "--latency-ms", "9000", deployment=deployment) == 0
    made = json.loads(result(redis, "plan-1", deployment)[PLAN_FILE])
    assert made["workload"]["answers"] == 100
    assert made["workload"]["output_p99"] == 3


def test_a_pool_that_does_not_answer_fails_the_job(redis: EmbeddedRedis, capsys: pytest.CaptureFixture[str]) -> None:
    redis.stop()
    assert plan(redis, "--workload", "8/8", "--latency-ms", "9000") == 1
    assert "orca plan: the pool does not answer: " in capsys.readouterr().err


def test_a_result_that_is_too_large_is_refused() -> None:
    settings = ResultSettings(pool="redis://127.0.0.1:1/0", result_key="plan-1")
    with pytest.raises(SettingError, match=f"more than {RESULT_BYTES_MAX}"):
        keep_result(settings, {PLAN_FILE: "x" * RESULT_BYTES_MAX}, {})
