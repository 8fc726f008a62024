"""Keeps searches for garbage off what lasts as long as its process.

A process imports its own module without any meanwhile:  python -m orca.core.process.gc_freeze MODULE ARGUMENTS...

What an import makes lasts as long as the process, and there is so much of it that the searches took an eighth of the
time in which torch is imported and a fifth of a gateway's.
"""

import atexit
import gc
import importlib
import sys
from types import ModuleType


def freeze_all() -> None:
    """No later search for garbage looks at what there is by now, because it lasts as long as the process. One search
    through a model and what it takes to load it, PyTorch among it, took 0.14 s, a fortieth of a benchmark's time."""
    gc.collect()
    _freeze()


def import_frozen(name: str) -> ModuleType:
    """The module. What it brings, if it is new, is left out of all later searches for garbage, too."""
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
    # Extension modules complain of leaks at the end of a process that cannot find what it holds.
    atexit.register(gc.unfreeze)


if __name__ == "__main__":
    import_frozen(sys.argv[1]).main(sys.argv[2:])
