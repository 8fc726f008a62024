"""The `orca` command as a process of its own: what it imports, and how it ends."""

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from orca.cli.main import COMMANDS


def test_help_names_every_command_and_imports_none_of_them() -> None:
    code = "import sys; from orca.cli.main import main\ntry: main(['--help'])\nfinally: print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [name for name in COMMANDS if f"\n  {name} " not in shown] == []
    assert [name for name in ("'torch'", "'grpc'", "'redis'", "'rich'", "'orca.cli.up'") if name in shown] == []


def test_up_imports_no_library_that_only_its_parts_need() -> None:
    code = "import sys, orca.cli.up.main; print(*sys.modules)"
    brought = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "redis", "fastapi", "uvicorn", "tokenizers", "prometheus_client"} & {*brought}


@pytest.mark.parametrize("part", ["rank_memory", "start", "pool"])
def test_a_measuring_script_prints_its_usage(part: str) -> None:
    line = [sys.executable, "-m", f"orca.bench.parts.{part}", "--help"]
    shown = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert shown.startswith(f"usage: {part}.py ")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a process 1 is made by root only")
def test_pid_1_of_a_container_ends_on_sigterm_while_it_still_imports() -> None:
    code = "import time, orca.cli.main as m; m._exit_on_sigterm(); print('up', flush=True); time.sleep(60)"
    apart = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(apart, stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout is not None
        assert outside.stdout.readline() == "up\n"
        [inside] = psutil.Process(outside.pid).children()
        inside.terminate()
        assert outside.wait(30) == 128 + signal.SIGTERM
