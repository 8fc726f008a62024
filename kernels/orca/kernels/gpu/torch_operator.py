"""Launches of kernels as operators of PyTorch's: what traces a step (`make_fx`) sees each as one node, and what it
changes.

Made of the dispatcher's own parts: a call costs the host 1.6 microseconds more than that of the function, where
`torch.library.custom_op`, which also looks for outputs that share memory, costs 5.3 (PyTorch 2.15; a step of 80 layers
has 400 launches). So every launch goes this way, traced or not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("orca", "FRAGMENT")


def operator(*changed: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes `orca::<name>` of a function of tensors and numbers that returns nothing: memory comes from its caller.

    Args:
        changed: names of the tensors that it writes into.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__.lstrip("_")
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=changed))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"orca::{name}", _nothing, lib=_LIBRARY)
        operation: Callable[..., None] = getattr(torch.ops.orca, name).default
        return operation

    return made


def _nothing(*_: Tensor | float | None, **__: Any) -> None:
    """What an operator does to tensors without numbers."""
