"""Orca without one of its rules, for real: the right rule of the checker finds each, in a short run from a seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

E2E = Path(__file__).parents[3] / "e2e"
LOAD = ("--seed", "11", "--max-tokens", "60", "--calls", "20")
KILL = ("kills", "--kills", "1", "--faults", "scheduler", "--no-freezes")
LOSE_REPLY = ("points", "--only", "scheduler grpc.Run: drop reply")
SOAK = ("soak", "--minutes", "5", "--quiet", "80", "--least-life", "2", "--faults", "rank")
COME_LATE = ("points", "--only", "worker serve.Run: come late")
OUTLIVE = ("points", "--only", "scheduler pool.commit: outlive")
# Several requests at a time, and memory for the blocks of about five that ended.
SHARE = ("kills", "--kills", "3", "--faults", "scheduler", "--no-freezes", "--tokens-between", "1000", "--rate", "4")
FEW_SLOTS = ("--up", "--slots", "512")
SLOW_STAGES = {"ORCA_WORKER_DELAY_MS": "10"}

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]


def rules_found(mutant: str, words: tuple[str, ...], folder: Path, *, up: tuple[str, ...] = ()) -> set[str]:
    """Run the checker on a mutant. Returns: the rules that it broke, according to the verdict."""
    command = [sys.executable, "-m", "checker", *words, "--mutant", mutant, *LOAD, "--out", str(folder / "run"), *up]
    environment = os.environ | (SLOW_STAGES if up else {})
    ran = subprocess.run(command, cwd=E2E, env=environment, capture_output=True, text=True, timeout=850, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert (folder / "run" / "verdict.json").exists(), ran.stdout + ran.stderr  # an error of the checker itself
    verdict = json.loads((folder / "run" / "verdict.json").read_text())["verdict"]
    return {violation["rule"] for violation in verdict["violations"]}


@pytest.mark.parametrize(
    ("mutant", "rule", "words"),
    [
        ("token left out", "equals_oracle", KILL),
        ("neighbour's slots", "equals_oracle", KILL),
        ("log not consumed", "equals_oracle", (*KILL, "--grammars")),
        ("log consumed twice", "has_no_error", (*KILL, "--grammars")),
        ("step twice", "stale_work_is_refused", LOSE_REPLY),
        ("epochs ignored", "stale_work_is_refused", COME_LATE),
        ("claims ignored", "stale_work_is_refused", OUTLIVE),
        ("calls remembered", "does_not_grow", SOAK),
    ],
)
def test_a_mutant_of_the_system_is_found_by_the_right_rule(
    mutant: str, rule: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    assert rule in rules_found(mutant, words, tmp_path)


@pytest.mark.parametrize(
    ("mutant", "rule"),
    [
        ("a block too many", "equals_oracle"),
        ("a block of another request", "equals_oracle"),
        ("a kept block overwritten", "equals_oracle"),
        ("an eviction not sent", "steps_fit"),
    ],
)
def test_a_mutant_of_shared_blocks_is_found_by_the_right_rule(mutant: str, rule: str, tmp_path: Path) -> None:
    assert rule in rules_found(mutant, (*SHARE, "--shared-prefixes"), tmp_path, up=FEW_SLOTS)
