"""Imports a process's own module without looking for garbage meanwhile:  python -m orca.core.begin MODULE ARGUMENTS...

What an import makes lasts as long as the process, and there is so much of it that the searches took an eighth of the
time in which torch is imported and a fifth of a gateway's.
"""

import atexit
import gc
import importlib
import sys
from types import ModuleType


def imported(name: str) -> ModuleType:
    """The module. What it brings, if it is new, is left out of all later searches for garbage, too."""
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        # Extension modules complain of leaks at the end of a process that cannot find what it holds.
        atexit.register(gc.unfreeze)
        gc.enable()


if __name__ == "__main__":
    imported(sys.argv[1]).main(sys.argv[2:])
