"""Triton kernels where there is no GPU: in Triton's interpreter, which gets ready once rather than at each call."""

import inspect
import os
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch


@cache
def interpret_without_gpu() -> None:
    """Switch Triton to its interpreter. Call this before a kernel is defined; a second call changes nothing."""
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    _get_ready_once()


def _get_ready_once() -> None:
    """Let Triton's language stay the interpreter's.

    Before each kernel, and each function that a kernel calls, the interpreter goes through all of `triton.language` and
    replaces what a GPU would do. After each kernel it undoes this. Our kernels are small and call many functions, so
    this takes more than half of their time. Where everything is interpreted, nothing has to be put back.
    """
    from triton import language
    from triton.runtime import interpreter

    replace: Callable[[FunctionType], Any] = interpreter._patch_lang
    replaced: set[ModuleType] = set()

    @cache
    def seen_by(function: FunctionType) -> frozenset[ModuleType]:
        modules = filter(inspect.ismodule, function.__globals__.values())
        return frozenset(each for each in modules if each in (language, language.core))

    def replace_once(function: FunctionType) -> Any:
        if not seen_by(function) <= replaced:
            replace(function)
            replaced.update(seen_by(function))
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once
