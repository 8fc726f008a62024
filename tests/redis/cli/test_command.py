"""`orca up` refuses a Redis that it cannot rely on."""

from pathlib import Path

import pytest

from orca.cli.main import main
from orca.pool.redis.embedded import EmbeddedRedis


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run `orca up` with flags it must refuse; returns what it said."""

    def run(*flags: str) -> str:
        assert main(["up", "--data", str(tmp_path / "data"), "--port", "0", *flags]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("orca up: ")
        assert said.err.count("\n") == 1
        return said.err.removeprefix("orca up: ").strip()

    return run


def test_a_redis_that_may_forget_requests_is_refused(refused, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", options=("--maxmemory-policy", "allkeys-lru")) as redis:
        said = refused("--redis-url", redis.url)
    assert said == (f"--redis-url {redis.url}: pool: Redis has maxmemory-policy allkeys-lru, it must be noeviction")
