"""Orca without one of its rules, for real: the right rule of the checker finds each, in a short run from a seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

E2E = Path(__file__).parents[3] / "e2e"
KILL = ("kills", "--kills", "1", "--faults", "scheduler", "--no-freezes")
LOSE_REPLY = ("points", "--only", "scheduler grpc.Run: drop reply")
SOAK = ("soak", "--minutes", "5", "--quiet", "80", "--least-life", "2", "--faults", "rank")
COME_LATE = ("points", "--only", "worker serve.Run: come late")
OUTLIVE = ("points", "--only", "scheduler pool.commit: outlive")


@pytest.mark.prove
@pytest.mark.timeout(900)
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
    load = ("--seed", "11", "--max-tokens", "60", "--rate", "2", "--calls", "20")
    command = [sys.executable, "-m", "checker", *words, "--mutant", mutant, *load, "--out", str(tmp_path / "run")]
    ran = subprocess.run(command, cwd=E2E, capture_output=True, text=True, timeout=850, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())["verdict"]
    assert rule in {violation["rule"] for violation in verdict["violations"]}
