"""`orca up` as a newcomer runs it: real processes, the small model, and nothing left behind."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from checker.systems.processes import find_parts
from orca.cli.small_model import small_model_folder
from support.cli.processes import wait_until_gone
from support.cli.up import PROMPT, UP_WITHIN_S, Up, completion

# Longer than the waits of any one test together, so that the wait that failed tells its story.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("up"), "--stages", "2", environment={"ORCA_SCHEDULER_ORDER": "edf"})
    try:
        up.wait_until_ready()
        yield up
    finally:
        up.end()


@pytest.mark.slow
def test_the_printed_processes_are_the_running_ones(up: Up) -> None:
    said = {name: int(pid) for name, pid in re.findall(r"^  (\S+) +(\d+)  \S", up.output, re.MULTILINE)}
    assert list(said) == ["redis", "gateway", "scheduler-0", "worker-0.0", "worker-0.1"]
    assert set(said.values()) == {child.pid for child in psutil.Process(up.process.pid).children()}
    assert httpx.get(f"{up.url}/ready").status_code == 200


def test_the_layout_is_printed_first(up: Up) -> None:
    said = up.output.splitlines()[0]
    layout = r"layout: 2 stages x 1 thread \(2\.8 M parameters, .*\d+ processors?\)"
    assert re.fullmatch(layout + "; prefetch 1, commits (at once|every 50 ms)", said)


def test_a_variable_that_an_option_wins_over_is_named(up: Up) -> None:
    assert up.output.splitlines()[1] == "variables: WARNING: orca up ignores ORCA_SCHEDULER_ORDER (use --order)"


def test_the_password_of_redis_is_only_in_its_file(up: Up) -> None:
    password = (up.folder / "data" / "redis" / "password").read_text()
    assert len(password) >= 32
    logs = [path.read_text() for path in (up.folder / "data").rglob("*.log*")]
    parts = [psutil.Process(up.process.pid), *up.family()]
    seen = [word for part in parts for word in (*part.cmdline(), *part.environ().values())]
    assert len(logs) >= 5
    assert not [text for text in (up.output, *logs, *seen) if password in text]


def run_example(example: str) -> str:
    """Return the output of the example. The call has a seed: without one the model sometimes ends before it has written
    a word.
    """
    seeded = re.sub(r'("?)temperature("?)([=:] ?)0\.7', r"\g<0>, \1seed\2\g<3>1", example)
    assert seeded.count("seed") == 1
    command = ["bash", "-c", seeded]
    return subprocess.run(command, capture_output=True, text=True, timeout=UP_WITHIN_S, check=True).stdout


def test_the_python_example_works(up: Up) -> None:
    [example] = re.findall(r"^\S*python\S* - <<'EOF'.*?^EOF\n", up.output, re.MULTILINE | re.DOTALL)
    assert re.search(r"[a-z]{2}", run_example(example))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_example_works(up: Up) -> None:
    [example] = re.findall(r"^curl .*$", up.output, re.MULTILINE)
    answer = json.loads(run_example(example))
    assert re.search(r"[a-z]{2}", answer["choices"][0]["text"])
    assert answer["usage"]["completion_tokens"] <= 40


async def test_the_official_client_gets_the_same_text_streamed_or_not_alone_or_beside_others(up: Up) -> None:
    messages = [{"role": "user", "content": "How do you like the country?"}]
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none") as client:

        async def whole(seed: int) -> str | None:
            call = client.chat.completions.create(model="orca-austen", messages=messages, max_tokens=24, seed=seed)
            return (await call).choices[0].message.content

        async def streamed(seed: int) -> str:
            chunks = await client.chat.completions.create(
                model="orca-austen", messages=messages, max_tokens=24, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        alone = [await whole(seed) for seed in range(4)]
        together = await asyncio.gather(*map(whole, range(4)), *map(streamed, range(4)))
    assert together == alone * 2
    assert len(set(alone)) == 4, "each seed says something else"


def test_a_killed_stage_is_restarted_and_the_same_prompt_gets_the_same_answer(up: Up) -> None:
    before = completion(up)
    [pid] = re.findall(r"^  worker-0\.1 +(\d+) ", up.output, re.MULTILINE)
    os.kill(int(pid), signal.SIGKILL)
    up.wait_until(lambda: "worker-0.1 was killed by SIGKILL" in up.output)
    assert completion(up) == before
    up.wait_until(lambda: re.search(r"^\S+Z ready again after \d", up.output, re.MULTILINE))
    [new] = re.findall(r" ready again after \S+ s, worker-0\.1 is pid (\d+)$", up.output, re.MULTILINE)
    assert int(new) == find_parts(up.process.pid)["worker-0.1"].pid
    up.family()


@pytest.mark.slow
def test_ready_again_after_both_stages_died_at_once(up: Up) -> None:
    told = up.output.count("ready again after")
    parts = find_parts(up.process.pid)
    for part in ("worker-0.0", "worker-0.1"):
        parts[part].kill()
    up.wait_until(lambda: up.output.count("ready again after") == told + 1)
    completion(up)
    up.family()


@pytest.mark.slow
def test_ready_again_after_a_rank_died_whom_its_controller_started_again(up: Up) -> None:
    told = up.output.count("ready again after")
    find_parts(up.process.pid)["rank-0.1.0"].kill()
    up.wait_until(lambda: up.output.count("ready again after") == told + 1)
    completion(up)
    up.family()


def test_ready_again_after_a_scheduler_died_waits_for_the_new_epoch(up: Up) -> None:
    told = up.output.count("ready again after")
    [pid] = re.findall(r"^  scheduler-0 +(\d+) ", up.output, re.MULTILINE)
    os.kill(int(pid), signal.SIGKILL)
    up.wait_until(lambda: up.output.count("ready again after") == told + 1)
    [logs] = re.findall(r"logs: (\S+)/<process>", up.output)
    log = (Path(logs) / "scheduler-0.log").read_text()
    assert log.rindex("epoch formed") > log.rindex("seat taken")
    up.family()


def events_of_a_long_stream(up: Up, *, in_the_middle: Callable[[], object] = lambda: None) -> list[str]:
    """All events of one, as bytes on the wire but for the words that are drawn for each call.

    Args: in_the_middle: done once, when the stream is well under way.
    """
    events: list[str] = []
    body = PROMPT | {"max_tokens": 300, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=UP_WITHIN_S) as answer:
        for line in filter(None, answer.iter_lines()):
            events.append(re.sub(r'"(id|created)":("[^"]*"|\d+)', "", line))
            if len(events) == 20:
                in_the_middle()
    return events


@pytest.fixture(scope="module")
def undisturbed(up: Up) -> list[str]:
    return events_of_a_long_stream(up)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["worker-0.0", "scheduler-0"])
def test_a_frozen_part_is_replaced_and_a_stream_completes_unchanged(up: Up, undisturbed: list[str], part: str) -> None:
    ready = up.output.count("ready again after")
    frozen = find_parts(up.process.pid)[part]
    events = events_of_a_long_stream(up, in_the_middle=lambda: frozen.send_signal(signal.SIGSTOP))
    assert events == undisturbed
    assert events[-1] == "data: [DONE]"
    said = f"{part} (pid {frozen.pid}) is frozen: it did not answer for 6 s; it is killed and started again"
    assert said in up.output
    up.wait_until(lambda: up.output.count("ready again after") > ready)
    assert find_parts(up.process.pid)[part].pid != frozen.pid
    up.family()


def test_ctrl_c_ends_everything_within_seconds_and_reports_it(tmp_path: Path) -> None:
    up = Up(tmp_path)
    try:
        up.wait_until_ready()
        assert "worker-0.1" not in up.output
        completion(up)
        assert len(up.family()) >= 4
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(UP_WITHIN_S) == 0
        wait_until_gone(up.seen)
        assert up.output.rstrip().endswith("stopped")
    finally:
        up.end()


def test_nothing_outlives_a_supervisor_killed_in_the_middle_of_its_start(tmp_path: Path) -> None:
    up = Up(tmp_path, "--stages", "2")
    try:
        # Redis, gateway, scheduler, two controllers and at least one rank.
        up.wait_until(lambda: len(up.family()) >= 6)
        up.process.kill()
        up.process.wait()
        # A rank that is importing torch notices that its controller is gone once the import is over.
        wait_until_gone(up.seen, UP_WITHIN_S)
    finally:
        up.end()


def assert_ends_its_start(up: Up, saying: str) -> None:
    """Check that the start ends with exit code 2, these words on one line, and no process left."""
    try:
        up.wait_until(lambda: up.family() and up.process.poll() is not None)
        assert up.process.returncode == 2, up.output
        assert re.search(saying, up.output, re.MULTILINE), up.output
        wait_until_gone(up.seen)
    finally:
        up.end()


@pytest.mark.slow
def test_more_slots_than_memory_end_the_start_with_the_schedulers_message(tmp_path: Path) -> None:
    up = Up(tmp_path, "--slots", "99999999999")
    assert_ends_its_start(up, r"^orca up: scheduler-0 did not start: .*slots: \d+ are wanted")


@pytest.mark.slow
def test_a_model_that_the_stages_refuse_ends_the_start_with_their_message(tmp_path: Path) -> None:
    model = tmp_path / "broken-model"
    shutil.copytree(small_model_folder(), model)
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors")
    up = Up(tmp_path, "--model", str(model))
    assert_ends_its_start(up, r"^orca up: worker-0\.. did not start: .*model\.norm\.weight")
