"""The ways of small tables from the host to a device, for which the host never waits, and back, for which the device
does not wait.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """The values on a device; on the CPU the same memory.

    It is copied in the order of the device's work, out of memory that is pinned: from any other the copy would wait for
    all that the device has to do before it.
    """
    there = torch.from_numpy(values)
    if device.type == "cpu":
        return there
    return there.pin_memory().to(device, non_blocking=True)


def host_view(to: Tensor) -> Tensor | NDArray[Any]:
    """What the host writes single numbers to, `[place] = number`: NumPy's view of a CPU's tensor. PyTorch's own way
    took 80 us behind a step, when the processor's caches hold weights instead of its code."""
    return to.numpy() if to.device.type == "cpu" else to


def scatter(to: Tensor, places: Sequence[int], values: Tensor | Sequence[int], taken: Sequence[int]) -> None:
    """to[places] = values[taken], where the host does not wait for the device of `to`.

    Args:
        values: [at least as many as are taken], on the host or there.
    """
    if not taken:
        return
    if to.device.type == "cpu":
        numbers = values.tolist() if isinstance(values, Tensor) else values
        to.numpy()[list(places)] = [numbers[place] for place in taken]
    else:
        scatter_on_device(to, places, values, taken)


def scatter_on_device(to: Tensor, places: Sequence[int], values: Tensor | Sequence[int], taken: Sequence[int]) -> None:
    """`put` by PyTorch's operations, which any device has."""
    there = torch.as_tensor(values, dtype=to.dtype, device=to.device)
    if len(taken) < len(there):
        there = there[to_device(np.array(taken, np.int64), to.device)]
    to.index_copy_(0, to_device(np.array(places, np.int64), to.device), there)


class HostCopy:
    """Tensors on their way to the host, on a stream of their own: the device goes on with its work meanwhile.

    Args:
        tensors: of one device, at least one, which nobody overwrites.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._there = list(tensors)
        self._copied: Any = None
        device = tensors[0].device
        if device.type == "cpu":
            return
        cuda: Any = torch.cuda  # untyped in parts
        made, self._copied = cuda.Event(), cuda.Event()
        made.record()
        stream = _reading(device)
        with cuda.stream(stream):
            stream.wait_event(made)
            self._there = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
            for to, of in zip(self._there, tensors, strict=True):
                to.copy_(of, non_blocking=True)
                of.record_stream(stream)
            self._copied.record()

    @property
    def is_ready(self) -> bool:
        """Whether `read` waits for nothing."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> list[Tensor]:
        """The tensors in the host's memory."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._there


@cache
def _reading(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
