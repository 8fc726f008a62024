"""Short runs of each disturbance on a real system violate nothing; each tells its seed and its counts."""

import subprocess
import sys
from pathlib import Path

import pytest

E2E = Path(__file__).parents[3] / "e2e"
LOAD = ("--max-tokens", "60", "--rate", "1", "--calls", "20")
NO_RUN = 2
"""Exit status of a run that this machine cannot make: partitions need root and network namespaces."""


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "words",
    [
        ("kills", "--seed", "1", "--kills", "6", "--faults", "scheduler,stage,rank"),
        ("kills", "--seed", "2", "--kills", "5"),
        ("kills", "--seed", "9", "--kills", "5", "--model-kind", "encoder-decoder"),
        ("freezes", "--seed", "21", "--rounds", "1"),
        ("points", "--seed", "3", "--only", "redis.commit"),
        ("points", "--seed", "4", "--only", "come late"),
        ("points", "--seed", "5", "--only", "redis.cancel"),
        ("partitions", "--seed", "6"),
        ("leavers", "--seed", "8", "--clients", "100"),
        ("soak", "--seed", "7", "--minutes", "5", "--quiet", "75", "--least-life", "2"),
    ],
    ids=" ".join,
)
def test_a_short_run_violates_nothing(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "checker", *words, *LOAD, "--out", str(tmp_path / "run")]
    ran = subprocess.run(command, cwd=E2E, capture_output=True, text=True, timeout=3500, check=False)
    if ran.returncode == NO_RUN:
        pytest.skip(ran.stdout.strip())
    with capsys.disabled():
        print(f"\n{' '.join(words)}{ran.stdout.partition('rules without evidence')[0][-700:]}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
