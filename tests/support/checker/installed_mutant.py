"""A mutant of the checker in this process, until the end of a block."""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from checker.points.mutants import MUTANTS


@contextmanager
def installed_mutant(name: str) -> Iterator[None]:
    """Install a mutant, and put back all that it replaced: other tests of this process must not meet it."""
    module_name, patch = MUTANTS[name]
    module = importlib.import_module(module_name)
    before = [(owner, dict(vars(owner))) for owner in owners(module)]
    patch(module)
    try:
        yield
    finally:
        for owner, attributes in before:
            for attribute in vars(owner).keys() - attributes.keys():
                delattr(owner, attribute)
            for attribute, value in attributes.items():
                if vars(owner)[attribute] is not value:
                    setattr(owner, attribute, value)


def owners(module: ModuleType) -> list[ModuleType | type]:
    """Return what a mutant may change: a module, and its classes."""
    return [
        module,
        *(kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__),
    ]
