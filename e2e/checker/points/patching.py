"""Changes a module directly after its import. A process that does not import the module does not load it."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Patch = Callable[[Any], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the named modules as Python would, and calls the patches of each after it has run."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                for patch in self.patches[fullname]:
                    patch(module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def after_import(module: str, patch: Patch) -> None:
    """Call `patch` with the module when it is imported. Several patches run in the order of these calls."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.patches.setdefault(module, []).append(patch)


def patched_modules() -> list[str]:
    """Return the names of the modules that have patches."""
    return list(_finder.patches)
