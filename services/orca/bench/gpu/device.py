"""The two things that the host must say aloud to a device that works on by itself."""

import gc

import torch


def wait(device: torch.device) -> None:
    """Until it has done all that was ordered."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back what nobody holds any more, cycles among it: the next one needs the memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
