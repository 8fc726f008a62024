"""`orca pool` on a Redis."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca.cli.main import main
from orca.cli.up.plan import DEPLOYMENT
from orca.core.domain.request import SCHEMA, FinishReason
from orca.pool.order.order_rules import ClaimOrder, OrderRules
from orca.pool.redis.access import LocalAccess
from orca.pool.redis.embedded import EmbeddedRedis
from support.pool.beds import REVISION, SETTINGS, RedisBed, entry, started, submission


@pytest.fixture
def data(tmp_path: Path) -> Iterator[str]:
    """The data folder of an `orca up` of which only the Redis runs."""
    folder = tmp_path / "redis"
    folder.mkdir()
    with EmbeddedRedis(folder, access=LocalAccess.prepare(folder, DEPLOYMENT)):
        yield str(tmp_path)


def test_stats_names_what_is_in_the_pool(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "stats", "--data", data]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (shown["queued"], shown["revision"], shown["schema"]) == ("0", "-", str(SCHEMA))


def test_an_external_redis_is_reached_by_its_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedRedis(tmp_path) as redis:
        assert main(["pool", "stats", "--pool", redis.url, "--deployment", "d"]) == 0
    assert "queued" in capsys.readouterr().out


def test_stats_count_waiting_requests_by_order_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedRedis(tmp_path) as redis:
        deployment = asyncio.run(let_wait(redis.url))
        assert main(["pool", "stats", "--pool", redis.url, "--deployment", deployment]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["by_order"] == "-2/4/7/0/none=1 0/4/7/0/end=2"


async def let_wait(url: str) -> str:
    """Let requests of a deployment wait for claims by an order. Returns: its name."""
    bed = RedisBed(url, SETTINGS)
    scheduler, _ = await started(bed)
    order = ClaimOrder(rules=OrderRules(), free_prompt_tokens=1, total_prompt_tokens=1)
    await scheduler.ask(most=0, order=order)
    await bed.pool.submit(submission("a", n=2, deadline_ms=60_000))
    await bed.pool.submit(submission("b", weight=4.0))
    await bed.close()
    return bed.deployment


def test_the_schema_in_force_is_printed_and_set(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "schema", "--data", data]) == 0
    assert main(["pool", "schema", str(SCHEMA), "--data", data]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"schema {SCHEMA} is in force; 0 requests")
    assert said[1] == f"schema {SCHEMA} is in force, before it was {SCHEMA}"


def test_an_unknown_schema_is_refused(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "schema", "99", "--data", data]) == 1
    assert f"schema {SCHEMA} stays in force" in capsys.readouterr().err


async def serve(url: str) -> str:
    """Let a deployment end two answers. Returns: its name."""
    bed = RedisBed(url, SETTINGS)
    _, owned = await started(bed, "a", "b")
    ends = entry(owned["a.0"], 0, 5, 6, end=FinishReason.STOP), entry(owned["b.0"], 0, 5, end=FinishReason.LENGTH)
    await bed.pool.commit(ends)
    await bed.close()
    return bed.deployment


def test_lengths_of_the_revision_in_force_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedRedis(tmp_path) as redis:
        place = ["--pool", redis.url, "--deployment", asyncio.run(serve(redis.url))]
        assert main(["pool", "lengths", *place]) == 0
        assert f"revision {REVISION}: 2 answers" in capsys.readouterr().out
        assert main(["pool", "lengths", "--json", "--half-life", "60", *place]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["pool", "lengths", "--revision", "another", *place]) == 1
        assert "no answer of revision another has ended by itself in the last 4 hours" in capsys.readouterr().err
    assert (found["revision"], found["cut_share"], found["output_tokens"]["p99"]) == (REVISION, 0.5, 2)


def test_latencies_of_the_revision_in_force_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedRedis(tmp_path) as redis:
        place = ["--pool", redis.url, "--deployment", asyncio.run(serve(redis.url))]
        assert main(["pool", "latencies", *place]) == 0
        assert f"revision {REVISION}: 2 answers" in capsys.readouterr().out
        assert main(["pool", "latencies", "--json", "--half-life", "60", *place]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["pool", "latencies", "--revision", "another", *place]) == 1
        assert "no answer of revision another" in capsys.readouterr().err
    assert (found["revision"], found["answers"], found["half_life_s"]) == (REVISION, 2, 60)
    assert found["seconds"]["sequence"]["p99"] <= found["seconds"]["request"]["p99"]


def test_lengths_of_a_pool_without_a_model_are_refused(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "lengths", "--data", data]) == 1
    assert "no revision is in force" in capsys.readouterr().err
