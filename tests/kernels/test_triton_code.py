"""The Triton kernels compile for GPUs that are not here, and what they are compiled to fits them."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from support.kernels import compile_triton

SPILLED_MAX = 160
"""Bytes of a thread: some of the largest tiles' addresses, and none of their sums, which would be a thousand."""
SPILLS = (89, "fp32")
"""Compute capability and dtype that spill up to 5 KiB: tiles of float32 are cut for the registers of larger GPUs."""


def compiled(*flags: str) -> list[dict[str, Any]]:
    """Return the output of a process without the interpreter, which this one may have asked for."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, compile_triton.__file__, *flags]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def require_fit(kernels: list[dict[str, Any]]) -> None:
    assert kernels
    for kernel in kernels:
        assert kernel["shared_bytes"] <= compile_triton.SHARED_BYTES[kernel["sm"]], kernel
        is_known = (kernel["sm"], kernel["kernel"].split()[1]) == SPILLS
        assert is_known or kernel["spilled_bytes"] <= SPILLED_MAX, kernel


@pytest.mark.slow
def test_kernels_of_the_usual_model_compile_for_a_hopper_gpu_without_spills() -> None:
    """bfloat16 and 128 dimensions: nothing is spilled, and prompts use the warp-group products of that processor."""
    kernels = compiled("--sm", "90", "--like", "bf16 128")
    assert {kernel["kernel"] for kernel in kernels} >= {"attend bf16 128 mixed", "attend bf16 128 decode"}
    require_fit(kernels)
    assert not any(kernel["spilled_bytes"] for kernel in kernels)
    assert [kernel["has_wgmma"] for kernel in kernels if kernel["kernel"] == "attend bf16 128 mixed"] == [True]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernel", ["keep bf16", "normalise", "activated bf16", "gated bf16", "make"])
def test_kernels_of_each_token_compile_for_a_hopper_gpu(kernel: str) -> None:
    require_fit(compiled("--sm", "90", "--like", kernel))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["weigh fp32", "cut fp32", "draw fp32"])
def test_sampling_kernels_spill_no_registers(kernel: str) -> None:
    kernels = compiled("--sm", "90", "--like", kernel)
    require_fit(kernels)
    assert not any(each["spilled_bytes"] for each in kernels)


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_in_all_sizes_for_ampere_hopper_and_blackwell() -> None:
    require_fit(compiled())
