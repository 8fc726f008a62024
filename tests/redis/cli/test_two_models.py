"""Real processes of two models on one pool: the gateway goes from one to the other while clients stream."""

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from orca.cli.small_model import small_model_folder
from orca.core.other_model import OtherModel
from orca.core.process.ports import free_port
from orca.pool.redis.embedded import EmbeddedRedis
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN_S = 150.0  # a shared two-core machine; alone a group forms in under ten
PROMPTS = ("It was a fine morning, and", "Mr. Darcy", "She could not but")
Answer = tuple[str, str, str]  # model, prompt, text


class Parts:
    """Processes of `orca`, which end with the test."""

    def __init__(self, folder: Path, pool_url: str) -> None:
        self._folder = folder
        self._common = ["--pool", pool_url, "--deployment", "two"]
        self._running: list[subprocess.Popen[bytes]] = []

    def gateway(self, model: Path, other: Path) -> str:
        """Returns: its URL."""
        port = free_port()
        others = OtherModel(folder=str(other)).to_text()
        self._start("gateway", "--model", str(model), "--other-models", others, "--port", str(port), *self._common)
        return f"http://127.0.0.1:{port}"

    def group(self, model: Path, generation: int) -> None:
        stage = f"127.0.0.1:{free_port()}"
        place = ["--stage", "0", "--stages", "1", "--slots-max", "4096", "--threads", "1"]
        self._start("worker", "--model", str(model), "--listen", stage, *place)
        identity = ["--group", model.name, "--generation", str(generation), "--stages", stage]
        self._start("scheduler", "--model", str(model), *identity, *self._common)

    def _start(self, part: str, *flags: str) -> None:
        with (self._folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "orca.cli.main", part, *flags]
            self._running.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def end(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        for process in self._running:
            process.kill()


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with EmbeddedRedis(tmp_path / "redis", port=0) as redis:
        parts = Parts(tmp_path, redis.url)
        try:
            yield parts
        finally:
            parts.end()


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """The small model with another weight: another revision, which says other things."""
    folder = tmp_path / "newer"
    shutil.copytree(small_model_folder(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][::-1].copy()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def ask(client: httpx.AsyncClient, prompt: str) -> Answer:
    """Stream one answer. Raises: httpx.HTTPError for one that is cut; AssertionError for one that is refused."""
    while (data := await data_of(client, prompt)) is None:
        await asyncio.sleep(0.2)
    assert data.pop() == "[DONE]"
    chunks = [json.loads(each) for each in data]
    [model] = {chunk["model"] for chunk in chunks}
    return model, prompt, "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def data_of(client: httpx.AsyncClient, prompt: str) -> list[str] | None:
    """Return the data of all events; None if the machine is too busy, where any client would try again."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            said = json.loads(await response.aread())
            assert said["error"]["code"] in ("pool_unavailable", "gateway_busy"), said
            return None
        return [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]


@contextlib.asynccontextmanager
async def load(client: httpx.AsyncClient, found: list[Answer], clients: int = 4) -> AsyncIterator[None]:
    """Clients that ask again and again; behind it all of them have their last answer."""
    is_over = asyncio.Event()

    async def one(number: int) -> None:
        for turn in itertools.count(number):
            if is_over.is_set():
                return
            found.append(await ask(client, PROMPTS[turn % len(PROMPTS)]))

    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(one(number))
        yield
        is_over.set()


async def test_under_load_every_answer_is_complete_and_of_the_model_that_accepted_it(parts: Parts, newer: Path) -> None:
    older = small_model_folder()
    url = parts.gateway(newer, other=older)
    found: list[Answer] = []
    async with httpx.AsyncClient(base_url=url, timeout=WITHIN_S) as client:

        async def serves(model: Path) -> bool:
            with contextlib.suppress(httpx.ConnectError):
                told = (await client.get("/ready")).json()
                return bool(told["ready"] and told["model"] == model.name)
            return False

        async def has_answered(model: Path) -> bool:
            return sum(name == model.name for name, _, _ in found) >= 12

        parts.group(older, generation=1)
        await until(lambda: serves(older), WITHIN_S)
        undisturbed = [await ask(client, prompt) for prompt in PROMPTS]
        async with load(client, found):
            await until(lambda: has_answered(older), WITHIN_S)
            parts.group(newer, generation=2)
            await until(lambda: has_answered(newer), WITHIN_S)
        undisturbed += [await ask(client, prompt) for prompt in PROMPTS]
    assert set(found) == set(undisturbed)
    assert len({text for _, _, text in undisturbed}) == 2 * len(PROMPTS)
