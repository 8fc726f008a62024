"""`python -m orca.bench.gpu`: checks in the interpreter, and says what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orca.bench.gpu.command import main
from orca.kernels.contract.activation import Activation
from orca.kernels.gpu import kernels


def test_every_kernel_is_checked_and_timed_beside_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["--device", "cpu", "--part", "kernels", "--runs", "1", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    names = {row["name"].partition(" of ")[0] for row in figures["operations"]}
    assert names >= {"attention, decode 2 x 300", "attention, prompt 40", "RMSNorm", "LayerNorm", "silu(gate) * up"}
    assert names >= {"sum, bias and RMSNorm", "bias and GELU", "biases and silu(gate) * up", "sampling"}
    assert all(row["seconds"] > 0 and row["limit_s"] > 0 for row in figures["operations"])
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    # Device, limits and two lines of heads before; seconds of the part and of all of it behind.
    assert len(printed.splitlines()) == 4 + len(figures["operations"]) + 2


def test_the_engine_is_in_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["--device", "cpu", "--part", "trace", "--part", "decode", "--runs", "1", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert "operations" not in figures
    assert all(row["is_right"] and row["seconds"] > 0 for part in ("decode", "trace") for row in figures[part])
    assert all(row["share"] == row["limit_s"] / row["seconds"] for row in figures["decode"])
    assert sum(each["seconds"] for each in figures["decode"][0]["more"]["operations"]) == pytest.approx(
        figures["decode"][0]["limit_s"]
    )
    printed = capsys.readouterr().out
    assert [part for part in ("kernels", "decode", "trace") if f"{part} took" in printed] == ["decode", "trace"]
    assert sum(" right: " in line for line in printed.splitlines()) == 5


@pytest.mark.slow
def test_a_wrong_result_is_reported_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gated(gate_up: Tensor, activation: Activation, bias: Tensor | None = None) -> Tensor:  # noqa: ARG001
        return gate_up.chunk(2, dim=-1)[0] + 1.0

    monkeypatch.setattr(kernels.TritonKernels, "gated", staticmethod(gated))
    assert main(["--device", "cpu", "--part", "kernels", "--runs", "1", "--dtype", "float32"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert [line.partition(" of ")[0] for line in lines] == ["silu(gate) * up", "biases and silu(gate) * up"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_bench_names_the_check_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_the_number_of_runs_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--device", "cpu", "--runs", "0"])
    assert exit_.value.code == 2
    assert "--runs: at least 1" in capsys.readouterr().err


def test_a_file_in_no_folder_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--json", str(tmp_path / "none" / "figures.json")])
    assert "cannot be written to" in capsys.readouterr().err
