"""Check the kernels of a GPU and the engine on it, and time both beside their limits: `orca bench gpu`.

`python -m orca.bench.gpu` is the same command.

The command needs a checkout, torch, triton and numpy, and downloads nothing. All parts run unless `--part` names some:

    kernels  each operation is first compared with its reference, then timed with cold caches. Its limit is what the
             same device does in the same run: bytes that it has to move at the speed of a copy, or products at the
             speed of PyTorch's matrix product, whichever takes longer.
    decode   steps of a model of 8 billion random parameters, whose tokens are checked. Their limit is the sum over
             their operations, each product at the rate of its own shape.
    trace    the paper's trace (ORCA, section 6.2), beside Hugging Face transformers if that is installed.
    translation
             128 sources of 260 to 440 tokens and their answers, on a model of flan-T5-XL's shape, beside its limit.

All but the first need the engine (PYTHONPATH=kernels:services). `--device cpu` runs small sizes, with the kernels in
Triton's interpreter: the checks are the same, but the times mean nothing.

The exit status is 1 if a result is wrong, and 2 if there is no GPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orca.bench.figures.figure import Measured
from orca.bench.figures.writer import append, measured
from orca.bench.kernels.table import HEAD, line
from orca.core.domain.errors import SettingError

if TYPE_CHECKING:
    import torch

    from orca.bench.kernels.clock import Clock
    from orca.kernels.device import Kernels

_ROUNDINGS_MAX = 8.0
"""Roundings by which a correct result may differ: sums are taken in another order, and probabilities are rounded before
they are multiplied by the values.
"""

PARTS = ("kernels", "decode", "trace", "translation")

HELP = "kernels, decode steps and the paper's trace, checked, then timed beside their limits"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m orca.bench.gpu`. Returns: the exit code."""
    parser = argparse.ArgumentParser(prog="python -m orca.bench.gpu", description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    options = parser.parse_args(argv)
    options.words = ["python", "-m", "orca.bench.gpu", *(sys.argv[1:] if argv is None else argv)]
    return run(options)


def act(options: argparse.Namespace, up_options: Sequence[str]) -> int:
    """Run `orca bench gpu`. Returns: the exit code."""
    if up_options:
        raise SettingError(f"nothing is started here that could take {' '.join(up_options)}")
    return run(options)


def add_options(parser: argparse.ArgumentParser) -> None:
    add, dtypes = parser.add_argument, ("bfloat16", "float16", "float32")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, in the interpreter")
    add("--part", choices=PARTS, action="append", help="may be given several times (all parts)")
    add("--dtype", choices=dtypes, help="of the tensors (bfloat16; on a CPU the engine's are float32)")
    add("--runs", type=_at_least_1, default=20, help="timed runs of each operation; their median counts")
    add("--json", type=_file, help="file for the figures")
    add("--figures", type=_file, help="append figures to this file, with device, commit and command")


def _at_least_1(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def _file(text: str) -> Path:
    """Check that the file can be written, before a run of ten minutes."""
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    return Path(text)


def run(chosen: argparse.Namespace) -> int:
    """Run the parts that were chosen. Returns: the exit code."""
    if chosen.figures is not None and chosen.device == "cpu":
        print("--figures needs a GPU: times of Triton's interpreter mean nothing", file=sys.stderr)
        return 2
    if chosen.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before they are imported
    import torch

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU here; --device cpu checks the kernels in Triton's interpreter", file=sys.stderr)
        return 2
    start_s = time.perf_counter()
    figures = _figures(chosen)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")
    rows = [row for part in ("operations", *PARTS) for row in figures.get(part, ())]
    append(chosen.figures, measured_figures(figures), words=chosen.words, device=figures["device"])
    print(f"{time.perf_counter() - start_s:.0f} s in all")
    return 0 if all(row["is_right"] for row in rows) else 1


def _figures(chosen: argparse.Namespace) -> dict[str, Any]:
    import torch

    from orca.bench.kernels.clock import Clock, copy_bandwidth, matmul_rate

    device, parts = torch.device(chosen.device), chosen.part or PARTS
    dtype = getattr(torch, chosen.dtype or "bfloat16")
    torch.manual_seed(1)
    is_real = device.type == "cuda"
    clock = Clock.of(device, chosen.runs)
    limits = {
        "copy_bytes_s": copy_bandwidth(clock, 1 << 30 if is_real else 1 << 10),
        "matmul_flops_s": matmul_rate(clock, dtype, *[8192 if is_real else 16] * 3),
    }
    name = torch.cuda.get_device_name() if is_real else "Triton's interpreter"
    figures: dict[str, Any] = {"device": name, "dtype": str(dtype), "torch": torch.__version__, "limits": limits}
    _print_head(figures, is_real=is_real)
    if "kernels" in parts:
        figures["operations"] = _operations(clock, dtype, limits)
    engine_dtype = getattr(torch, chosen.dtype or ("bfloat16" if is_real else "float32"))
    engine_parts = [part for part in parts if part != "kernels"]
    return figures | _engine_rows(engine_parts, clock, engine_dtype, limits["copy_bytes_s"])


def _engine_rows(names: Sequence[str], clock: "Clock", dtype: "torch.dtype", copy_bytes_s: float) -> dict[str, Any]:
    """Return the rows of the engine's parts as plain data; none if a library that the engine needs is missing."""
    if not names:
        return {}
    needed = ("safetensors", "numba") if clock.device.type == "cpu" else ("safetensors",)
    if missing := [name for name in needed if find_spec(name) is None]:
        print(f"engine rows: left out, {missing[0]} is not installed")
        return {}
    from orca.bench.gpu.parts import engine_figures
    from orca.bench.gpu.rows import Asked

    return engine_figures(Asked(clock=clock, dtype=dtype, copy_bytes_s=copy_bytes_s), names)


def _operations(clock: "Clock", dtype: Any, limits: dict[str, float]) -> list[dict[str, Any]]:
    from orca.bench.kernels.operations import LLAMA_8B, SMALL, operations
    from orca.kernels.gpu.kernels import TritonKernels

    start_s = time.perf_counter()
    sizes = LLAMA_8B if clock.device.type == "cuda" else SMALL
    rows = []
    for operation in operations(cast("Kernels", TritonKernels()), sizes, dtype, clock.device):
        rows.append(_measured(operation, clock, limits))
        _print(rows[-1])
    print(f"kernels took {time.perf_counter() - start_s:.0f} s")
    return rows


def _measured(operation: Any, clock: "Clock", limits: dict[str, float]) -> dict[str, Any]:
    roundings = operation.check()
    by_memory, by_products = operation.bytes / limits["copy_bytes_s"], operation.flops / limits["matmul_flops_s"]
    limit_s = max(by_memory, by_products)
    seconds = clock.seconds(operation.call)
    return {
        "name": operation.name,
        "roundings": roundings,
        "is_right": roundings <= _ROUNDINGS_MAX,
        "seconds": seconds,
        "limit_s": limit_s,
        "limit": "memory" if by_memory >= by_products else "products",
        "share": limit_s / seconds,
        "rival_s": None if operation.rival is None else clock.seconds(operation.rival),
    }


def measured_figures(figures: Mapping[str, Any]) -> list[Measured]:
    """Return the figures for the benchmark pages: the times of all correct results."""
    dtype = str(figures["dtype"]).removeprefix("torch.")
    found = []
    for part in ("operations", *PARTS[1:]):
        for row in figures.get(part, ()):
            if not row["is_right"] or row["seconds"] is None:
                continue
            settings = {"run": row["name"], "part": part, "dtype": dtype if part == "operations" else None}
            found.append(measured("Time of a run", row["seconds"], "ms", settings, scale=1000))
            if row["limit_s"] is not None:
                share = row["limit_s"] / row["seconds"]
                found.append(measured("Share of the limit", share, "%", settings, scale=100))
            if row.get("rival_s") is not None:
                found.append(measured("Speed against PyTorch's", row["rival_s"] / row["seconds"], "x", settings))
            if row.get("host_gap_s") is not None:
                found.append(measured("Host gap between two steps", row["host_gap_s"], "ms", settings, scale=1000))
    return found


def _print_head(figures: dict[str, Any], *, is_real: bool) -> None:
    limits = figures["limits"]
    copied, multiplied = limits["copy_bytes_s"] / 1e9, limits["matmul_flops_s"] / 1e12
    print(f"{figures['device']}, {figures['dtype']}, torch {figures['torch']}")
    print(
        f"copy {copied:.0f} GB/s, product of 8192 {multiplied:.0f} TFLOP/s"
        if is_real
        else "only the results count: the times of an interpreter, and the limits beside them, mean nothing"
    )
    print(HEAD, flush=True)


def _print(row: dict[str, Any]) -> None:
    beside = None if row["rival_s"] is None else row["rival_s"] / row["seconds"]
    result = "right" if row["is_right"] else f"WRONG by {row['roundings']:.0f} roundings"
    measured = {key: row[key] for key in ("seconds", "limit_s", "limit")}
    print(line(row["name"], result, **measured, beside=beside), flush=True)
