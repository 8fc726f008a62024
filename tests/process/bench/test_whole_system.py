"""Measurements that start a whole system themselves."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orca.bench.main import main as bench
from orca.bench.peers.model import LlamaShape, make_model
from support.waiting import wait_until

# Longer than the waits of any one test together, so that the wait that failed tells its story.
pytestmark = pytest.mark.timeout(400)

LIMIT_S = 120.0
ONE_SMALL_STAGE = ["--", "--stages", "1", "--threads", "1"]
TINY = LlamaShape(layers=2, hidden=48, heads=4, kv_heads=2, intermediate=80, vocab=300, positions=256)


def test_a_sweep_starts_the_system_and_gets_every_token(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TINY)
    file = tmp_path / "points.json"
    runs = ["--policies", "request_level", "--max-batch-sizes", "4", "--rates", "50,100", "--requests", "6"]
    line = ["sweep", "--model", str(tmp_path / "model"), *runs, "--json", str(file), *ONE_SMALL_STAGE]
    assert bench(line) == 0
    points = json.loads(file.read_text())
    assert [point["rate_per_s"] for point in points] == [50.0, 100.0]
    assert [(point["report"]["requests"], point["report"]["errors"]) for point in points] == [(6, {})] * 2


def test_conversations_run_with_and_without_the_prefix_cache(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TINY)
    file = tmp_path / "turns.json"
    sizes = ["--system-tokens", "40", "--question-tokens", "8:16", "--answer-tokens", "4:8", "--rounds", "1"]
    held = ["--model", str(tmp_path / "model"), "--conversations", "3", "--turns", "2"]
    assert bench(["turns", *held, *sizes, "--json", str(file), *ONE_SMALL_STAGE]) == 0
    [cached, plain] = json.loads(file.read_text())["model"]
    prompts = [sum(turn["prompt_tokens"] for turn in each["turns"]) for each in (cached, plain)]
    assert plain["computed_tokens"] == prompts[0] == prompts[1]
    assert not any(turn["cached_tokens"] for turn in plain["turns"])
    assert cached["computed_tokens"] + sum(turn["cached_tokens"] for turn in cached["turns"]) == prompts[0]
    # The second turns find all full blocks of the first ones, and the system prompt has two.
    assert all(turn["cached_tokens"] >= 48 for turn in cached["turns"] if turn["turn"] == 2)


@pytest.mark.slow
def test_choices_and_a_repair_compute_a_common_prompt_once(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TINY)
    file = tmp_path / "runs.json"
    sizes = ["--model", str(tmp_path / "model"), "--prompt-tokens", "70", "--rounds", "1", "--json", str(file)]
    assert bench(["turns", "--choices", "4", *sizes, *ONE_SMALL_STAGE]) == 0
    computed = {
        (each["cache"], each["choices"]): each["computed_tokens"] for each in json.loads(file.read_text())["model"]
    }
    assert computed == {
        ("with", 1): [70],
        ("with", 4): [70 + 3 * 6],
        ("without", 1): [70],
        ("without", 4): [4 * 70],
    }
    make_model(tmp_path / "slower", replace(TINY, layers=8, hidden=256, intermediate=512))
    sizes[1] = str(tmp_path / "slower")
    assert bench(["turns", "--repair", "--conversations", "3", *sizes, *ONE_SMALL_STAGE]) == 0
    cached, plain = json.loads(file.read_text())["slower"]
    assert (cached["cache"], plain["cache"]) == ("with", "without")
    # How many of its 128 tokens a request had is chance. Two of three begin with the 64 tokens of full blocks.
    assert (cached["found_again"], plain["found_again"]) == (2 * 64, 0)
    assert all(0 < each["computed_again"] + each["found_again"] <= 3 * (70 + 32 + 128) for each in (cached, plain))
    assert all(0 < each["first_s"] <= each["all_s"] for each in (cached, plain))


def test_a_measurement_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TINY)
    command = [sys.executable, "-m", "orca.cli.main", "bench", "sweep", "--model", str(tmp_path / "model")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    said = tmp_path / "said"
    with said.open("wb") as output:
        measurement = subprocess.Popen([*command, *ONE_SMALL_STAGE], env=environment, stdout=output, stderr=output)
    try:
        # Itself, `orca up`, and at least one process of the system.
        wait_until(lambda: len(processes_of(tmp_path)) > 2 or measurement.poll() is not None, LIMIT_S, said.read_text)
        assert measurement.poll() is None, said.read_text()
    finally:
        measurement.kill()
        measurement.wait()
    wait_until(lambda: not processes_of(tmp_path), LIMIT_S, lambda: f"still there: {processes_of(tmp_path)}")


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it ended in between
            continue
    return found


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rate", "systems_wanted"), [([], 4), (["--rate", "20"], 2)], ids=["saturated", "paced"])
def test_the_comparison_judges_and_shows_all_systems(tmp_path: Path, rate: list[str], systems_wanted: int) -> None:
    make_model(tmp_path / "model", TINY)
    file = tmp_path / "peers.json"
    size = ["--requests", "12", "--rounds", "2", "--batch-size", "4", "--threads", "1"]
    assert bench(["peers", "--model", str(tmp_path / "model"), *size, *rate, "--json", str(file)]) == 0
    systems = json.loads(file.read_text())["systems"]
    assert [len(system["tokens_per_s"]) for system in systems] == [2] * systems_wanted
    assert all(judged["wrong"] == judged["wrong_counts"] == 0 for system in systems for judged in system["judgements"])
    for peaks, held in zip(systems[-1]["memory"], systems[-1]["ranks_hold"], strict=True):
        [rank] = [peak for peak in peaks if peak["name"] == "rank"]
        assert rank["whole_bytes"] > rank["anonymous_bytes"] > held["weight_bytes"] > 0
        assert held["slots"] > 0
