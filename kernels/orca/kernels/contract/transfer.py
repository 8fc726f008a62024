"""Copies of small tensors between host and device: the host never waits for a copy to the device, and the device never
waits for a copy to the host.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return the values on a device; on the CPU, without a copy.

    The copy follows the order of the device's work, from pinned memory: from pageable memory the host would wait until
    the device has finished all its earlier work.
    """
    there = torch.from_numpy(values)
    if device.type == "cpu":
        return there
    return there.pin_memory().to(device, non_blocking=True)


def host_view(to: Tensor) -> Tensor | NDArray[Any]:
    """Return an object to which the host can write single numbers by `[index] = number`.

    For a tensor on the CPU it is a NumPy view: PyTorch's own assignment took 80 us after a step, when the processor's
    caches hold weights instead of PyTorch's code.
    """
    return to.numpy() if to.device.type == "cpu" else to


def scatter(to: Tensor, places: Sequence[int], values: Tensor | Sequence[int], taken: Sequence[int]) -> None:
    """Set to[places] = values[taken] without waiting for the device of `to`.

    Args:
        values: on the host or on that device.
    """
    if not taken:
        return
    if to.device.type == "cpu":
        numbers = values.tolist() if isinstance(values, Tensor) else values
        to.numpy()[list(places)] = [numbers[place] for place in taken]
    else:
        scatter_on_device(to, places, values, taken)


def scatter_on_device(to: Tensor, places: Sequence[int], values: Tensor | Sequence[int], taken: Sequence[int]) -> None:
    """`scatter` with PyTorch's operations, for any device."""
    there = torch.as_tensor(values, dtype=to.dtype, device=to.device)
    if len(taken) < len(there):
        there = there[to_device(np.array(taken, np.int64), to.device)]
    to.index_copy_(0, to_device(np.array(places, np.int64), to.device), there)


class HostCopy:
    """A copy of tensors to the host, on a stream of its own, so that the device continues with other work.

    Args:
        tensors: one or more tensors of one device; they must not be overwritten.
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
            self._there = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for to, of in zip(self._there, tensors, strict=True):
                to.copy_(of, non_blocking=True)
                of.record_stream(stream)
            self._copied.record()

    @property
    def is_ready(self) -> bool:
        """True if `read` returns without waiting."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> list[Tensor]:
        """Wait for the copy. Returns: the tensors in host memory."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._there


@cache
def _reading(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
