"""`orca pool`: the pool of an `orca up` or of an external Redis, asked from a terminal."""

from pathlib import Path

import pytest

from orca.cli.main import main
from orca.pool.redis.access import COMMANDS


def test_an_unreachable_pool_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "stats", "--pool", f"unix://{tmp_path}/none.sock"]) == 1
    assert "the pool does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "an action is needed"),
        (["forget"], "an action is needed"),
        (["schema", "new"], "'new' is not a whole number"),
        (["lengths", "--half-life", "0"], "--half-life: 0 is not 1 or more"),
        (["stats", "--half-life", "60"], "--half-life"),
        (["stats", "--data", "/nowhere"], "/nowhere/redis is not from `orca up`"),
        (["acl", "--deployment", "a b"], "setting --deployment: a deployment's name must be free of"),
    ],
)
def test_a_mistake_is_reported_by_name(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", *words]) == 2
    assert said in capsys.readouterr().err


def test_acl_prints_the_rights_of_a_deployment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "acl", "--deployment", "shop"]) == 0
    said = capsys.readouterr()
    default, user = (line.split() for line in said.out.splitlines())
    assert default == ["user", "default", "off", "~*", "&*", "+@all"]
    assert user[:4] == ["user", "orca", "on", ">PASSWORD"]
    assert user[4:8] == ["~orca:{shop}:*", "resetchannels", "&orca:{shop}:news", "-@all"]
    assert len(user) == 8 + len(COMMANDS)
    assert "forgets every request" in said.err


def test_acl_names_a_missing_password_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ORCA_POOL_PASSWORD_FILE", "/nowhere/password")
    assert main(["pool", "acl"]) == 2
    assert "/nowhere/password" in capsys.readouterr().err
