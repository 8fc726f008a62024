"""The checker shares no code with what it checks."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_checker_imports_nothing_of_the_product() -> None:
    code = "import sys, checker.__main__; print([name for name in sys.modules if name.partition('.')[0] == 'orca'])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "e2e", capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
