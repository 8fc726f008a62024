"""`orca follow` as a Job of the operator: it reads the counts of a pool on Redis, and leaves its result there."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca.cli.main import main
from orca.core.domain.request import FinishReason
from orca.core.job_files import PLAN_FILE, REPORT_FILE, STATE_FILE, SUMMARY_FILE, read_files
from orca.core.plan_report import PlanReport, read_report
from orca.planner.follow.single_check import NO_LENGTHS
from orca.planner.follow.state import FollowState, read_state, state_from_json
from orca.planner.profile.profile import to_json
from orca.planner.search.plan import Plan, from_json, read_plan
from orca.planner.search.plan import to_json as plan_to_json
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import open_redis_pool
from support.planner.profiles import profile
from support.pool.beds import SETTINGS, RedisBed, entry, started

GOAL = ("--latency-ms", "3000", "--strategies", "iteration", "--stages", "2", "--slots", "128")
ANSWERS = 200


@dataclasses.dataclass
class Job:
    """The files of a Job, as the operator finds them in the pool."""

    files: dict[str, str]

    @property
    def report(self) -> PlanReport:
        return read_report(self.files[REPORT_FILE])

    @property
    def state(self) -> FollowState:
        return state_from_json(self.files[STATE_FILE].encode(), "x")

    @property
    def plan(self) -> Plan:
        return from_json(self.files[PLAN_FILE].encode(), "x")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return a plan with batches of one, so that another one brings more."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "profile.json").write_bytes(to_json(profile()))
    words = ["--profile", f"{folder}/profile.json", "--workload", "8:40/2:20", "--max-batch-size", "1"]
    assert main(["plan", *words, *GOAL, "--out", f"{folder}/plan.json"]) == 0
    return read_plan(folder / "plan.json")


@pytest.fixture
def folder(made: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a profile and a plan in force, and work in it."""
    (tmp_path / "profile.json").write_bytes(to_json(profile()))
    (tmp_path / "plan.json").write_bytes(plan_to_json(made))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def served(redis: EmbeddedRedis) -> str:
    """Return a deployment whose pool has counted answers of 3 tokens to prompts of 10."""

    async def serve() -> str:
        bed = RedisBed(redis.url, SETTINGS)
        names = (f"r{each}" for each in range(ANSWERS))
        scheduler, owned = await started(bed, *names, prompt=(1,) * 10, max_new_tokens=5)
        while owned:
            await bed.pool.commit([entry(each, 0, 1, 2, 3, end=FinishReason.STOP) for each in owned.values()])
            owned = await scheduler.take()
        await bed.close()
        return bed.deployment

    return asyncio.run(serve())


def follow(redis: EmbeddedRedis, *flags: str, deployment: str) -> int:
    words = ["--profile", "profile.json", "--plan", "plan.json", "--pool", redis.url, "--deployment", deployment]
    return main(["follow", *words, *GOAL, *flags])


def result(redis: EmbeddedRedis, deployment: str) -> Job:
    """Return what the Job of a check has left in the pool."""

    async def read() -> bytes | None:
        pool = await open_redis_pool(redis.url, deployment, SETTINGS)
        try:
            return await pool.result("check-1")
        finally:
            await pool.close()

    body = asyncio.run(read())
    assert body is not None
    return Job(read_files(body))


def test_a_check_on_the_counted_answers_is_left_in_the_pool(
    redis: EmbeddedRedis, folder: Path, made: Plan, served: str
) -> None:
    key = ("--result-key", "check-1")
    assert follow(redis, *key, "--workload", "8:40/2:20", deployment=served) == 0
    first = result(redis, served)
    assert first.files.keys() == {PLAN_FILE, SUMMARY_FILE, REPORT_FILE, STATE_FILE}
    assert (first.plan, first.state.plan, first.report.is_new) == (made, made, False)
    assert (first.report.lengths.answers, first.report.lengths.output_p99) == (ANSWERS, 3)
    assert first.report.planned_lengths.answers == 0
    assert first.report.predicted is not None
    assert first.report.predicted.throughput > made.predicted.throughput, "the answers are shorter than planned"
    assert first.report.reason.endswith(" % more requests/s, in 1 check of 3")
    (folder / "state.json").write_text(first.files[STATE_FILE])
    assert follow(redis, *key, "--state", "state.json", deployment=served) == 0
    assert result(redis, served).report.reason.endswith(" % more requests/s, in 2 checks of 3")


def test_a_user_sees_the_check_of_a_running_system(
    redis: EmbeddedRedis, folder: Path, made: Plan, served: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "checks").mkdir()
    (folder / "checks/shortfall").write_text("of yesterday")
    assert follow(redis, "--replan", "off", "--out", "checks", deployment=served) == 0
    reason, plan, drift = capsys.readouterr().out.splitlines()
    assert reason == "the plan meets the goal on the lengths of now"
    assert plan.startswith(f"{made.schedule.describe()}; predicted 99 % in ")
    assert drift.startswith("lengths since the plan was made: prompt mean -5")
    state = read_state(folder / "checks/state.json")
    assert state.describe() == plan
    assert read_plan(folder / "checks/plan.json") == made
    assert not (folder / "checks/shortfall").exists()


@pytest.mark.usefixtures("folder")
def test_a_pool_that_has_counted_nothing_is_no_error(redis: EmbeddedRedis, made: Plan) -> None:
    assert follow(redis, "--result-key", "check-1", deployment="new") == 0
    job = result(redis, "new")
    assert (job.plan, job.report.reason) == (made, NO_LENGTHS)
    assert job.report.lengths == job.report.planned_lengths


@pytest.mark.usefixtures("folder")
def test_a_pool_that_does_not_answer_fails_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedRedis(tmp_path / "redis") as gone:
        pass
    assert follow(gone, "--workload", "8/8", deployment="new") == 1
    assert "orca follow: the pool does not answer: " in capsys.readouterr().err
