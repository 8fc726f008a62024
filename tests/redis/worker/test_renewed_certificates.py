"""A scheduler process and two stage processes with what the operator issues, through an exchange of all of it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca.bench.parts.stage_processes import Stages
from orca.cli.small_model import small_model_folder
from orca.core.domain.errors import NotInForce
from orca.core.domain.model import load_model_info
from orca.core.domain.request import Request, SamplingParams
from orca.operator.cluster import credentials
from orca.pool.api import RequestPool
from orca.pool.records import OnDisconnect, OwnershipState, Submission
from orca.pool.redis.embedded import EmbeddedRedis
from orca.pool.redis.pool import open_redis_pool
from support.waiting import PATIENT_POOL
from support.worker.engine_builders import until

NAME = "shop.default.svc"
FLAGS = {"--tls-ca-file": "ca.crt", "--tls-certificate-file": "tls.crt", "--tls-key-file": "tls.key"}
PROMPT = (5, 6, 7, 8)


def put_new_files(folder: Path) -> None:
    """Write files of another CA: the earlier certificates are then worth no more than expired ones.

    All files change at once, as a kubelet changes them: each is a link through `..data`, which is replaced.
    """
    version = Path(tempfile.mkdtemp(prefix="..version-", dir=folder))
    for key, text in credentials.issue("shop", NAME, None, time.time()).items():
        (version / key).write_text(text)
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(Path("..data") / key)
    (folder / "..new").symlink_to(version.name)
    (folder / "..new").rename(folder / "..data")


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    folder = tmp_path / "certificates"
    folder.mkdir()
    put_new_files(folder)
    return folder


@pytest.fixture
def flags(certificates: Path) -> list[str]:
    words = [word for flag, key in FLAGS.items() for word in (flag, str(certificates / key))]
    return [*words, "--tls-server-name", NAME]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def stages(tmp_path: Path, flags: list[str]) -> Iterator[Stages]:
    started = Stages(small_model_folder(), stages=2, tensor=1, log_folder=tmp_path, flags=flags)
    yield started
    started.stop()


@pytest.fixture
def scheduler(redis: EmbeddedRedis, stages: Stages, flags: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "orca.scheduler.service", "--model", str(small_model_folder())]
    command += ["--pool", redis.url, "--stages", ",".join(stages.addresses), "--log-level", "error", *flags]
    child = subprocess.Popen(command)
    yield child
    child.kill()
    child.wait()


@pytest.mark.prove
@pytest.mark.timeout(700)
async def test_a_group_forms_again_with_other_certificates_without_restarting_a_process(
    redis: EmbeddedRedis, stages: Stages, scheduler: subprocess.Popen[bytes], certificates: Path
) -> None:
    pool = await open_redis_pool(redis.url, "orca", PATIENT_POOL)
    try:
        tokens = await answer(pool, "before")
        put_new_files(certificates)
        os.kill(stages.rank_pids(1)[0], signal.SIGKILL)
        assert await answer(pool, "after") == tokens
    finally:
        await pool.close()
    assert [child.poll() for child in (scheduler, *stages.processes)] == [None] * 3


async def answer(pool: RequestPool, parent: str) -> list[int]:
    """Tokens of the same greedy request."""
    request = Request(
        parent=parent,
        choice=0,
        revision=load_model_info(small_model_folder(), dtype="float32").revision,
        prompt=PROMPT,
        max_new_tokens=8,
        sampling=SamplingParams(temperature=0.0, ignore_eos=True),
    )
    submission = Submission(
        parent=parent, requests=(request,), reader="test", on_disconnect=OnDisconnect.KEEP, render="{}"
    )

    async def is_accepted() -> bool:
        """Once a group has been formed."""
        try:
            await pool.submit(submission)
        except NotInForce:
            return False
        return True

    async def has_ended() -> bool:
        return (await pool.status(request.id)).state is OwnershipState.ENDED

    await until(is_accepted, limit_s=150.0)
    await until(has_ended, limit_s=150.0)
    return [token.id for token in (await pool.read(request.id, 0)).tokens]
