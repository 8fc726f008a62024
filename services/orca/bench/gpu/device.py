"""Wait for a device, and free its memory."""

import gc

import torch


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work that the host has launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Free the memory of unused tensors, also of those in reference cycles: the next measurement needs it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
