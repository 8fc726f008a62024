"""Processes import their parts with garbage collection off, and switch it on afterwards."""

import subprocess
import sys
from pathlib import Path

from orca.core.process.gc_freeze import import_frozen

LEAVES_OUT = """
import gc, weakref
from orca.core.process.gc_freeze import freeze_all


class Node:
    pass


def main(argv):
    node = Node()
    node.itself, dead, before = node, weakref.ref(node), gc.get_freeze_count()
    del node
    freeze_all()
    print(dead() is None, gc.get_freeze_count() > before, gc.isenabled())
"""

MODULE = """
import gc

while_importing = gc.isenabled()


def main(argv):
    print(while_importing, gc.isenabled(), gc.get_freeze_count() > 0, *argv)
"""


def run(folder: Path, content: str) -> "subprocess.CompletedProcess[str]":
    """Begin a process with a module of this content."""
    (folder / "part_of_a_test.py").write_text(content)
    command = [sys.executable, "-m", "orca.core.process.gc_freeze", "part_of_a_test", "5", "--flag"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_a_part_is_imported_without_garbage_collection_and_runs_with_it(tmp_path: Path) -> None:
    ended = run(tmp_path, MODULE)
    assert (ended.stdout, ended.returncode) == ("False True True 5 --flag\n", 0)


def test_nothing_stays_frozen_when_the_process_ends(tmp_path: Path) -> None:
    at_end = "import atexit, gc\natexit.register(lambda: print(gc.get_freeze_count()))\n"
    assert run(tmp_path, at_end + "def main(argv): pass").stdout == "0\n"


def test_existing_objects_can_be_frozen_after_a_collection(tmp_path: Path) -> None:
    assert run(tmp_path, LEAVES_OUT).stdout == "True True True\n"


def test_a_part_that_cannot_be_imported_reports_why(tmp_path: Path) -> None:
    ended = run(tmp_path, "import a_library_that_is_not_there")
    assert ended.returncode == 1
    assert "No module named 'a_library_that_is_not_there'" in ended.stderr


def test_an_already_imported_module_freezes_nothing() -> None:
    # Python 3.12 begins with some hundred objects that are left out.
    code = (
        "import gc, json; from orca.core.process.gc_freeze import import_frozen; "
        "before = gc.get_freeze_count(); import_frozen('json'); "
        "print(gc.get_freeze_count() - before, gc.isenabled())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "0 True\n"


def test_the_import_returns_the_module() -> None:
    assert import_frozen("orca.core.process.gc_freeze").import_frozen is import_frozen
