"""The way of small tables from the host to a device, for which the host never waits."""

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
