"""The hooks of the checker in real processes."""

import ast
import asyncio
import importlib
import inspect
import json
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from checker.faults.freezes import running_standby
from checker.points.mutants import MUTANTS
from checker.points.names import DROP_REPLY, KILL_BEFORE, POINTS, REMOTE_VARIABLE

E2E = Path(__file__).parents[3] / "e2e"

# A commit of one entry to a Redis that is not there, or is `lambda`, inside a process that says it is a scheduler.
COMMIT = """
import asyncio, sys
from orca.core.domain.errors import PoolUnavailable
from orca.pool.redis.link import RedisLink
said = []
async def commit():
    link = object.__new__(RedisLink)
    try:
        await RedisLink.run(link, "commit")
    except PoolUnavailable as error:
        print(error)
    except AttributeError:
        print("called")
for _ in range(2):
    asyncio.run(commit())
"""


def arm(folder: Path, **order: Any) -> None:
    wanted = {"part": "scheduler", "call": "redis.commit", "nth": 1, "action": DROP_REPLY} | order
    (folder / "armed").write_text(json.dumps(wanted))


@pytest.mark.parametrize(("action", "status"), [(KILL_BEFORE, -9), (DROP_REPLY, 0)])
def test_a_real_process_is_hit_at_the_named_call_without_a_hook_in_its_code(
    tmp_path: Path, action: str, status: int
) -> None:
    arm(tmp_path, action=action)
    paths = [str(E2E / "checker" / "points" / "inject"), str(E2E), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "ORCA_CHECKER_INJECT": str(tmp_path)}
    command = [sys.executable, "-c", COMMIT, "orca.cli.main", "scheduler"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == status, ran.stderr
    assert (tmp_path / "fired").exists()


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_mutant_uses_only_names_that_its_module_has(mutant: str) -> None:
    module, patch = MUTANTS[mutant]
    texts = {
        ast.unparse(node) for node in ast.walk(ast.parse(inspect.getsource(patch))) if isinstance(node, ast.Attribute)
    }
    used = {text.removeprefix("module.") for text in texts if text.startswith("module.") and "(" not in text}
    assert used
    for name in used:
        attrgetter(name)(importlib.import_module(module))


# Patches name modules, classes and methods of the product in text: importing each module runs its patches.
IMPORT_ALL = """
import importlib, sys
from pathlib import Path
from checker.points import fault_points, patching, recorder
fault_points.install(Path(sys.argv[1]), sys.argv[2])
recorder.install(Path(sys.argv[1]), sys.argv[2])
for name in patching.patched_modules():
    importlib.import_module(name)
served = [getattr(sys.modules[name], kind) for name, kind in fault_points.SERVED.items()]
print(*[name for kind in served for name in fault_points.METHODS if hasattr(kind, name)])
"""


@pytest.mark.parametrize("part", sorted({point.part for point in POINTS}))
def test_every_name_that_is_patched_exists(part: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(E2E), os.environ.get("PYTHONPATH", "")])}
    environment |= {REMOTE_VARIABLE: "1"}
    command = [sys.executable, "-c", IMPORT_ALL, str(tmp_path), part]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    served = {point.call.removeprefix("serve.") for point in POINTS if point.call.startswith("serve.")}
    assert served <= set(ran.stdout.split())


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_each_mutant_finds_the_line_that_it_removes(name: str, tmp_path: Path) -> None:
    module, _ = MUTANTS[name]
    made = (
        "from orca.pool.redis.transitions import all_transitions; "
        "from orca.pool.schemas import SCHEMAS; all_transitions(SCHEMAS)"
    )
    code = f"from checker.points import mutants; mutants.install({name!r}); import {module}; {made}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(E2E), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, timeout=100, check=True)


async def test_a_standby_waits_for_the_seat_before_the_block_and_ends_after_it(tmp_path: Path) -> None:
    code = "import time; print('another process holds the seat', flush=True); time.sleep(300)"
    first = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.DEVNULL)
    process = psutil.Process(first.pid)
    context: Any = SimpleNamespace(system=SimpleNamespace(parts=lambda: {"scheduler-0": process}, logs=tmp_path))
    try:
        async with running_standby(context):
            children = [child for child in psutil.Process().children() if child.pid != first.pid]
            # Other tests' servers may be children of this process, too.
            [standby] = [child for child in children if child.cmdline() == process.cmdline()]
        assert not standby.is_running()
    finally:
        first.kill()
        await first.wait()
