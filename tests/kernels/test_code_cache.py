"""The kernels' tests once more, on the code that is kept: almost every process runs that. It is not what runs where it
was compiled: there, inner functions come from code of their own. Here LLVM has optimised them once more, as parts of
their kernel. It has done so wrongly before: an activation lost half of its outputs.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orca.kernels.cpu.team.code import cache_folder

_HERE = Path(__file__).parent


def _kept(home: Path) -> dict[Path, int]:
    """The files of code, and when each was written: what is out of date is written again."""
    return {file: file.stat().st_mtime_ns for file in home.rglob("*.nbc")}


@pytest.mark.parametrize(
    "tests", [["test_rows.py"], pytest.param(["test_product.py", "test_attention.py"], marks=pytest.mark.slow)], ids=str
)
@pytest.mark.slow
@pytest.mark.timeout(1250)  # twice the limit of a run, where nothing is kept
@pytest.mark.skipif(cache_folder() is None, reason="no code can be kept here")
def test_kernels_loaded_from_the_code_cache_pass_their_tests(tests: list[str], tmp_path: Path) -> None:
    kept_in = cache_folder()
    assert kept_in is not None
    # A copy: other tests compile kernels meanwhile, which is no reason for another run. What they write just now may be
    # gone again.
    with contextlib.suppress(shutil.Error):
        shutil.copytree(kept_in, tmp_path / "orca" / "kernels" / kept_in.name)
    for _ in range(2):
        before = _kept(tmp_path)
        # Kernels of GPUs are interpreted here, for minutes, and no code of theirs is kept. Tiles of other processors
        # run on these, whose own they are then.
        chosen = ["-m", "not prove", "-k", "not gpu and not avx2 and not avx512"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
        command += [str(_HERE / name) for name in tests]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        # Where some was compiled now, a norm by itself and one inside a product may differ by a bit: one of them may be
        # kept code and the other not.
        if _kept(tmp_path) == before:
            assert ran.returncode == 0, ran.stdout[-8000:]
            return
    pytest.fail("kernels are compiled in each run: none of them is kept")
