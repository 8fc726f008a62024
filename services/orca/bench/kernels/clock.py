"""Times of device work, and the two rates that limit it: memory copies and matrix products."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True, slots=True)
class Clock:
    """Times calls on a device, each with cold caches.

    Args:
        runs: number of runs; their median counts.
    """

    device: torch.device
    runs: int
    flushed: torch.Tensor  # larger than the processor's last cache; written before each run

    @classmethod
    def of(cls, device: torch.device, runs: int) -> "Clock":
        size = 2 << 30 if device.type == "cuda" else 1
        return cls(device, runs, torch.empty(size, dtype=torch.int8, device=device))

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call. Untimed calls before it compile its kernels."""
        for _ in range(2):
            call()
        return median(self._run(call) for _ in range(self.runs))

    def _run(self, call: Callable[[], object]) -> float:
        self.flushed.zero_()
        if self.device.type != "cuda":
            start_s = time.perf_counter()
            call()
            return time.perf_counter() - start_s
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device is still busy with the write before, for longer than the host needs to launch the call. So
        # launching does not count.
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def copy_bandwidth(clock: Clock, size: int) -> float:
    """Return the bytes that a copy of `size` bytes reads and writes per second."""
    of, to = (torch.zeros(size, dtype=torch.int8, device=clock.device) for _ in range(2))
    return 2 * size / clock.seconds(lambda: to.copy_(of))


def matmul_rate(clock: Clock, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    """Return the FLOP/s of PyTorch's product of [rows, inputs] and [inputs, outputs]."""
    one = torch.randn(rows, inputs, device=clock.device).to(dtype)
    other = torch.randn(inputs, outputs, device=clock.device).to(dtype)
    return 2 * rows * inputs * outputs / clock.seconds(lambda: one @ other)
