"""Checks the kernels of a GPU and times them beside their limits: `python -m orca.kernels.bench [--json FILE]`.

Needs a checkout, torch, triton and numpy; loads nothing. Each operation is first compared with its reference, then
timed with cold caches. Its limit is what the same device does in the same run: bytes that it has to move at the speed
of a copy, or products at the speed of PyTorch's matrix product, whichever takes longer. `--device cpu` runs small sizes
in Triton's interpreter: the checks are the same, the times say nothing.

Exits with 1 when a result is wrong, with 2 when there is no GPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orca.kernels.bench.clock import Clock

_ROUNDINGS_MAX = 8.0
"""Of a right result: sums in another order, and probabilities that are rounded before they meet the values."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m orca.kernels.bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, in the interpreter"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the tensors"
    )
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each operation; their median counts")
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args(argv)
    if chosen.runs < 1:
        parser.error("--runs: at least 1")
    if chosen.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before they are imported
    import torch

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU here; --device cpu checks the kernels in Triton's interpreter", file=sys.stderr)
        return 2
    figures = _figures(chosen.device, getattr(torch, chosen.dtype), chosen.runs)
    _print(figures)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if any(row["roundings"] > _ROUNDINGS_MAX for row in figures["operations"]) else 0


def _figures(device_name: str, dtype: Any, runs: int) -> dict[str, Any]:
    import torch

    from orca.kernels.bench.clock import Clock, copy_bandwidth, matmul_rate
    from orca.kernels.bench.operations import LLAMA_8B, SMALL, operations
    from orca.kernels.triton_kernels import TritonKernels

    device = torch.device(device_name)
    torch.manual_seed(1)
    is_real = device.type == "cuda"
    clock = Clock.of(device, runs)
    limits = {
        "copy_bytes_s": copy_bandwidth(clock, 1 << 30 if is_real else 1 << 10),
        "matmul_flops_s": matmul_rate(clock, dtype, *[8192 if is_real else 16] * 3),
    }
    chosen = operations(TritonKernels(), LLAMA_8B if is_real else SMALL, dtype, device)
    rows = [_measured(operation, clock, limits) for operation in chosen]
    name = torch.cuda.get_device_name() if is_real else "Triton's interpreter"
    return {"device": name, "dtype": str(dtype), "torch": torch.__version__, "limits": limits, "operations": rows}


def _measured(operation: Any, clock: "Clock", limits: dict[str, float]) -> dict[str, Any]:
    roundings = operation.check()
    by_memory, by_products = operation.bytes / limits["copy_bytes_s"], operation.flops / limits["matmul_flops_s"]
    limit_s = max(by_memory, by_products)
    seconds = clock.seconds(operation.call)
    return {
        "name": operation.name,
        "roundings": roundings,
        "seconds": seconds,
        "limit_s": limit_s,
        "limit": "memory" if by_memory >= by_products else "products",
        "share": limit_s / seconds,
        "rival_s": None if operation.rival is None else clock.seconds(operation.rival),
    }


def _print(figures: dict[str, Any]) -> None:
    limits = figures["limits"]
    print(f"{figures['device']}, {figures['dtype']}, torch {figures['torch']}")
    print(
        f"copy {limits['copy_bytes_s'] / 1e9:.0f} GB/s, product of 8192 {limits['matmul_flops_s'] / 1e12:.0f} TFLOP/s"
    )
    print(f"{'operation':44} {'ms':>9} {'limit':>9} {'':8} {'share':>6} {'beside PyTorch':>14}  result")
    for row in figures["operations"]:
        beside = "" if row["rival_s"] is None else f"{row['rival_s'] / row['seconds']:.2f} x"
        verdict = "right" if row["roundings"] <= _ROUNDINGS_MAX else f"WRONG by {row['roundings']:.0f} roundings"
        times = f"{1e3 * row['seconds']:9.3f} {1e3 * row['limit_s']:9.3f} {row['limit']:8}"
        print(f"{row['name']:44} {times} {100 * row['share']:5.0f}% {beside:>14}  {verdict}")


if __name__ == "__main__":
    sys.exit(main())
