"""Compile the Triton kernels for GPUs, none of which need be there: `compile_triton.py --help`.

Each kernel, dtype and head_dim is compiled in the sizes that launches use. The output shows the registers of a thread,
the bytes that it spills into memory, the shared memory of a program, and whether products are Hopper's warp-group ones.
One JSON line for each.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from orca.kernels.contract.activation import Activation
from orca.kernels.gpu import inputs, norms, sampling, write_kv
from orca.kernels.gpu.activations import BLOCK, activate_rows, gate_rows
from orca.kernels.gpu.attention import SPLIT, constants_of, shape_of, stages_of
from orca.kernels.gpu.attention_item import attend
from orca.kernels.gpu.norms import WIDTH_MAX

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory of a program at most, by compute capability (CUDA C++ Programming Guide, table of technical
specifications).
"""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 80, 96, 128, 256)
VOCABS = (32_000, 128_256)
BLOCK_TOKENS = 16
WIDTHS = ("width", "vocab", "bias_room", "masked_room")


class Variant(NamedTuple):
    """A kernel as it is launched."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


def variants() -> Iterator[Variant]:
    """Yield all variants of the product's Triton kernels."""
    for dtype, head_dim, has_wide in product(NAMES, HEAD_DIMS, (False, True)):
        shape, of = shape_of(dtype, head_dim), f"*{NAMES[dtype]}"
        constants = constants_of(shape, 32, 8, BLOCK_TOKENS, head_dim) | {"narrow": shape.narrow, "has_wide": has_wide}
        constants |= {"part_rows": shape.narrow, "row_heads": 32 + 2 * 8, "is_causal": True, "has_bias": False}
        signature = {"qkv": of, "cache": of, "items": "*i32", "tables": "*i32", "first_query": "*i32", "out": of}
        signature |= {"partials": "*fp32", "arrived": "*i32", "bias": "*fp32"}
        signature |= {"columns": "i32", "zero": "i32", "window": "i32", "scale": "fp32"}
        warps = shape.warps if has_wide else shape.narrow_warps
        name = f"attend {NAMES[dtype]} {head_dim} {'mixed' if has_wide else 'decode'}"
        options = {"num_warps": warps, "num_stages": shape.stages}
        yield Variant(name, attend, signature, constants, options)
        if head_dim == 64:  # the encoder of most T5 models
            of_encoder = constants | {"is_causal": False, "has_bias": True}
            options = {"num_warps": warps, "num_stages": stages_of(shape, has_bias=True)}
            yield Variant(f"biased {name}", attend, signature, of_encoder, options)
    for dtype in NAMES:
        of = f"*{NAMES[dtype]}"
        for head_dim in HEAD_DIMS:
            signature = {"qkv": of, "bias": of, "cache": of, "slots": "*i64", "rotations": "*fp32", "head_norm": of}
            signature |= {"block_tokens": "i32", "eps": "fp32"}
            constants = write_kv.constants_of(48, 16, head_dim, has_bias=True, has_rotary=True, is_normed=True)
            yield Variant(f"keep {NAMES[dtype]} {head_dim}", write_kv.write_kv_rows, signature, constants, {})
        for width, has_bias, is_added in product((4096, 8192, WIDTH_MAX), (False, True), (False, True)):
            signature = dict.fromkeys(("x", "added", "added_bias", "weight", "bias", "normed"), of)
            signature |= {"width": "i32", "eps": "fp32"}
            constants = {"has_bias": has_bias, "is_added": is_added, "has_added_bias": is_added, "block": width}
            options = {"num_warps": norms.warps_of(width)}
            kind = f"{'layer' if has_bias else 'rms'}{' of a sum' if is_added else ''}"
            name = f"normalise {NAMES[dtype]} {width} {kind}"
            yield Variant(name, norms.normalise_rows, signature, constants, options)
        for activation in Activation:
            constants = {"has_bias": True, "block": BLOCK, "activation": int(activation)}
            signature = {"gate_up": of, "bias": of, "gated": of, "width": "i32"}
            yield Variant(f"gated {NAMES[dtype]} {activation.name}", gate_rows, signature, constants, {})
            signature = {"x": of, "bias": of, "out": of, "width": "i32"}
            yield Variant(f"activated {NAMES[dtype]} {activation.name}", activate_rows, signature, constants, {})
    yield from _inputs()
    yield from _sampling()


def _inputs() -> Iterator[Variant]:
    """Yield the variants of kernels that build the inputs of recorded steps."""
    signature = {
        "requests": "*i64",
        "tables": "*i32",
        "columns": "i32",
        "last_tokens": "*i64",
        "prompts": "*i64",
        "ids": "*i64",
    }
    signature |= {"positions": "*i64", "slots": "*i64", "lines": "*i32", "indices": "*i64", "rows": "i32"}
    constants = {"block_tokens": BLOCK_TOKENS, "block": inputs.ROWS_A_PROGRAM}
    yield Variant("make rows", inputs.fill_rows, signature, constants, {})
    signature = {
        "requests": "*i64",
        "keys": "*i64",
        "columns": "i32",
        "items": "*i32",
        "rows": "i32",
        "window": "i32",
    }
    shape = shape_of(torch.bfloat16, 128)
    constants = {
        "is_causal": True,
        "positions": shape.positions,
        "split": SPLIT,
        "part_lines": 32,
        "block": inputs.ROWS_MAX,
    }
    yield Variant("make items", inputs.fill_items, signature, constants, {})


def _sampling() -> Iterator[Variant]:
    tables = {"lines": "*i32", "indices": "*i64", "numbers": "*fp32", "integers": "*i64", "bias_tokens": "*i32"}
    tables |= {"bias": "*fp32", "masked": "*i32", "counts": "*i16", "parts": "*fp32"}
    sizes = {"vocab": "i32", "bias_room": "i32", "masked_room": "i32"}
    floors, drawn = {"floors": "*fp32"}, {"tokens": "*i64", "logprobs": "*fp32", "last_tokens": "*i64"}
    more = (("weigh", {}), ("cut", floors), ("draw", floors | drawn))
    for dtype, vocab, (name, own) in product((torch.float32, torch.bfloat16), VOCABS, more):
        launch = sampling.LAUNCHES[name]
        signature = {"logits": f"*{NAMES[dtype]}"} | tables | own | sizes
        yield Variant(
            f"{name} {NAMES[dtype]} {vocab}", launch.kernel, signature, launch.constants(vocab), launch.options
        )


def compiled(variant: Variant, capability: int) -> dict[str, Any]:
    """Return the compiler's figures of a kernel."""
    signature = variant.signature | dict.fromkeys(variant.constants, "constexpr")
    order = [name for name in variant.kernel.arg_names if name in signature]
    assert len(order) == len(signature) == len(variant.kernel.arg_names)
    # As a launch finds out of its arguments: memory of PyTorch begins at multiples of 16 bytes, widths are some, too.
    aligned = [place for place, name in enumerate(order) if signature[name].startswith("*") or name in WIDTHS]
    source = ASTSource(
        fn=variant.kernel,
        signature={name: signature[name] for name in order},
        constexprs=variant.constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"enable_fp_fusion": True} | variant.options
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": variant.name,
        "sm": capability,
        "shared_bytes": made.metadata.shared,
        **_usage(made.asm["cubin"]),
        "has_wgmma": "wgmma.mma_async" in made.asm["ptx"],
    }


def _usage(code: bytes) -> dict[str, int]:
    """Return the resources per thread that the machine code uses."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(code)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: re.search(rf"{name}:(\d+)", said) for name in ("REG", "STACK", "LOCAL")}
    registers, stack, local = (int(each[1]) for each in found.values() if each is not None)
    return {"registers": registers, "spilled_bytes": stack + local}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sm", type=int, nargs="+", default=list(SHARED_BYTES), help="compute capabilities")
    parser.add_argument("--like", default="", help="only kernels whose name has this in it")
    chosen = parser.parse_args()
    for capability in chosen.sm:
        for variant in variants():
            if chosen.like in variant.name:
                print(json.dumps(compiled(variant, capability)), flush=True)
