"""The imports of the controller's process."""

import subprocess
import sys


def test_the_controller_process_imports_no_torch() -> None:
    code = "import sys, orca.worker.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
