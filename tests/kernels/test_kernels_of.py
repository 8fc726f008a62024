"""Each device gets the kernels made for it."""

import pytest
import torch

from orca.kernels.device import kernels_of, reason_against_triton, use_kernels
from orca.kernels.plain import PlainKernels

CPU = torch.device("cpu")


def test_gpus_since_ampere_get_triton() -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert reason_against_triton(capability, has_triton=True) is None


def test_other_gpus_get_pytorchs_operations_for_a_reason() -> None:
    older = "kernels are for compute capability 8.0 and above, this GPU has 7.5"
    assert reason_against_triton((7, 5), has_triton=True) == older
    assert reason_against_triton((9, 0), has_triton=False) == "the package triton is not installed"
    assert reason_against_triton(None, has_triton=True) == "PyTorch finds no GPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda:7")
    assert type(kernels_of(device)) is PlainKernels
    assert kernels_of(device) is kernels_of(device)
    assert [record.message for record in caplog.records] == [
        "cuda:7 computes with PyTorch's own operations: PyTorch finds no GPU"
    ]


def test_other_kernels_may_be_used_temporarily() -> None:
    usual, one, other = kernels_of(CPU), PlainKernels(), PlainKernels()
    with use_kernels("cpu", one):
        assert kernels_of(CPU) is one
        with use_kernels("cpu", other):
            assert kernels_of(CPU) is other
            assert kernels_of(torch.device("meta")) is not other
        assert kernels_of(CPU) is one
    assert kernels_of(CPU) is usual
