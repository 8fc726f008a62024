"""Keeps the garbage collector away from objects that last as long as their process.

This runs a module whose imports are not collected:  python -m orca.core.process.gc_freeze MODULE ARGUMENTS...

The objects that an import makes last as long as the process. There are so many of them that collections took an eighth
of the time in which torch is imported, and a fifth of a gateway's.
"""

import atexit
import gc
import importlib
import sys
from types import ModuleType


def freeze_all() -> None:
    """Leave all objects that exist now out of later collections, because they last as long as the process.

    One collection through a model and all that loads it, including PyTorch, took 0.14 s, a fortieth of a benchmark.
    """
    gc.collect()
    _freeze()


def import_frozen(name: str) -> ModuleType:
    """Import a module. Objects that a first import makes are left out of all later collections."""
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        _freeze()
        gc.enable()


def _freeze() -> None:
    gc.freeze()
    # Extension modules report leaks at the end of a process whose objects are still frozen.
    atexit.register(gc.unfreeze)


if __name__ == "__main__":
    import_frozen(sys.argv[1]).main(sys.argv[2:])
