"""One user with few rights, a password from a file, and certificates that may change: what a connection proves."""

import dataclasses
import re
import stat
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from orca.cli.main import main as orca
from orca.core.domain.errors import PoolUnavailable, SettingError
from orca.pool.redis.access import COMMANDS, LOCAL_USER, LocalAccess
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import open_redis_pool
from orca.pool.settings import PoolSettings, parse_pool_settings
from support.pool.beds import REVISION, SETTINGS, RedisBed, submission
from support.pool.kinds import redis_binary

POOL_ON_REDIS = Path(__file__).parents[3] / "services" / "orca" / "pool" / "redis"
DIRECT = {"eval", "evalsha", "info", "subscribe", "unsubscribe", "wait", "ping", "select"}
OF_THE_RELEASE_BEFORE = {"sadd", "sismember"}


def local_settings(access: LocalAccess) -> PoolSettings:
    return dataclasses.replace(SETTINGS, user=LOCAL_USER, password_file=str(access.password_file))


def test_the_user_may_run_only_the_commands_of_scripts_and_client() -> None:
    scripts = "".join(path.read_text() for path in (POOL_ON_REDIS / "scripts").glob("*.lua"))
    called = {word.lower() for word in re.findall(r"call\(\s*'([A-Z]+)'", scripts)}
    assert set(COMMANDS) == called | DIRECT | OF_THE_RELEASE_BEFORE
    assert len(COMMANDS) == len(set(COMMANDS))


@pytest.mark.parametrize(
    "command",
    [("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("GET", "another"), ("PUBLISH", "another", "x"), ("SAVE",)],
    ids=" ".join,
)
async def test_the_user_may_do_nothing_else(redis_bed: RedisBed, command: tuple[str, ...]) -> None:
    user = Redis.from_url(redis_bed.url, username=redis_bed.deployment, password="a-password-of-tests")
    with pytest.raises(NoPermissionError):
        await user.execute_command(*command)
    await user.aclose()


@pytest.mark.parametrize("without", ["-info", "-evalsha", "-zrangebyscore", "resetkeys", "resetchannels"])
async def test_a_user_without_the_rights_is_an_outage_with_that_reason(redis_bed: RedisBed, without: str) -> None:
    """Also where it is a script that would need them."""
    await redis_bed.redis.execute_command("ACL", "SETUSER", redis_bed.deployment, without)
    with pytest.raises(PoolUnavailable, match="Redis user lacks a right"):
        await use(redis_bed)


async def use(bed: RedisBed) -> None:
    pool = await open_redis_pool(bed.url, bed.deployment, bed.settings)
    try:
        await pool.set_revision(REVISION, 1)
        await pool.submit(submission("a"))
        await pool.sweep()
    finally:
        await pool.close()


@pytest.mark.parametrize("kind", ["redis-6.2", "redis-7"])
async def test_an_embedded_redis_admits_only_its_one_user(tmp_path: Path, kind: str) -> None:
    access = LocalAccess.prepare(tmp_path, "d")
    with EmbeddedRedis(tmp_path, binary=redis_binary(kind), access=access) as server:
        pool = await open_redis_pool(server.url, "d", local_settings(access))
        assert await pool.set_revision(REVISION, 1) == REVISION
        await pool.close()
        nobody = Redis.from_url(server.url, protocol=2)
        with pytest.raises(RedisConnectionError, match="uthentication required"):
            await nobody.ping()
        await nobody.aclose()


@pytest.mark.parametrize("kind", ["redis-6.2", "redis-7"])
async def test_a_redis_with_the_users_that_the_command_prints_forgets_nothing_when_it_restarts(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    access = LocalAccess.at(tmp_path)
    access.password_file.write_text("a-password-of-tests\n")
    monkeypatch.setenv("ORCA_POOL_PASSWORD_FILE", str(access.password_file))
    assert orca(["pool", "acl", "--deployment", "d"]) == 0
    access.acl_file.write_text(capsys.readouterr().out)
    with EmbeddedRedis(tmp_path, binary=redis_binary(kind), access=access) as server:
        pool = await open_redis_pool(server.url, "d", local_settings(access))
        await pool.set_revision(REVISION, 1)
        for number in range(50):
            await pool.submit(submission(f"r{number}"))
        await pool.close()
        server.kill()
        server.restart()
        again = await open_redis_pool(server.url, "d", local_settings(access))
        assert (await again.stats()).queued == 50
        await again.close()


def test_a_folder_keeps_its_password_and_users_that_others_added(tmp_path: Path) -> None:
    first = LocalAccess.prepare(tmp_path, "d")
    password = first.password
    with first.acl_file.open("a") as file:
        file.write("user somebody on nopass\n")
    assert LocalAccess.prepare(tmp_path, "d").password == password
    lines = first.acl_file.read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["default", LOCAL_USER, "somebody"]
    assert password not in first.acl_file.read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (first.acl_file, first.password_file)} == {0o600}


async def test_a_rotated_password_takes_effect_at_the_next_connect(redis_bed: RedisBed, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("wrong\n")
    settings = dataclasses.replace(redis_bed.settings, password_file=str(file))
    with pytest.raises(PoolUnavailable, match="invalid username-password"):
        await open_redis_pool(redis_bed.url, redis_bed.deployment, settings)
    file.write_text("a-password-of-tests\n")
    pool = await open_redis_pool(redis_bed.url, redis_bed.deployment, settings)
    await pool.close()


async def test_a_missing_password_file_is_an_outage_that_names_it(redis_bed: RedisBed) -> None:
    settings = dataclasses.replace(SETTINGS, password_file="/nowhere/password")
    with pytest.raises(PoolUnavailable, match="/nowhere/password"):
        await open_redis_pool(redis_bed.url, "d", settings)


@pytest.mark.parametrize(
    "url", ["redis://u:hidden@h:1/0", "rediss://:hid/den@h:1", "unix:///s?password=hidden", "redis://hidden@h"]
)
async def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(SettingError, match="ORCA_POOL_PASSWORD_FILE") as refused:
        await open_redis_pool(url, "d", SETTINGS)
    assert "hid" not in str(refused.value)


def test_access_settings_are_environment_variables() -> None:
    variables = {"ORCA_POOL_USER": "u", "ORCA_POOL_PASSWORD_FILE": "/p", "ORCA_POOL_ACCEPTS_LOSS": "true"}
    settings = parse_pool_settings(variables)
    assert (settings.user, settings.password_file, settings.accepts_loss) == ("u", "/p", True)
    with pytest.raises(SettingError, match="go together"):
        parse_pool_settings({"ORCA_POOL_TLS_KEY_FILE": "/k"})
