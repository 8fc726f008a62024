"""python -m orca.kernels.bench: checks in the interpreter, and says what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orca.kernels import triton_kernels
from orca.kernels.bench.__main__ import main


def test_every_kernel_is_checked_and_timed_beside_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["--device", "cpu", "--runs", "1", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    names = {row["name"].partition(" of ")[0] for row in figures["operations"]}
    assert names >= {
        "attention, decode 2 x 300",
        "attention, prompt 40",
        "RMSNorm",
        "LayerNorm",
        "silu(gate) * up",
        "sampling",
    }
    assert all(row["seconds"] > 0 and row["limit_s"] > 0 for row in figures["operations"])
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert len(printed.splitlines()) == 3 + len(figures["operations"])


def test_a_wrong_result_is_told_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def gated_silu(gate_up: Tensor) -> Tensor:
        return gate_up.chunk(2, dim=-1)[0] + 1.0

    monkeypatch.setattr(triton_kernels.TritonKernels, "gated_silu", staticmethod(gated_silu))
    assert main(["--device", "cpu", "--runs", "1", "--dtype", "float32"]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert line.startswith("silu(gate) * up")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_check_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_runs_must_be_some(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--device", "cpu", "--runs", "0"])
    assert exit_.value.code == 2
    assert "--runs: at least 1" in capsys.readouterr().err
