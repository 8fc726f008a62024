"""The engine's rows of `orca bench gpu`, on a CPU."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from orca.bench.gpu import paper_trace, parts
from orca.bench.gpu.check import verdict
from orca.bench.gpu.decode import decode_rows
from orca.bench.gpu.parts import PARTS, engine_figures
from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.gpu.rows import Asked, EngineRow
from orca.bench.gpu.seq2seq import translation
from orca.bench.gpu.shapes import SMALL, llama, made, random_tokens
from orca.bench.gpu.steps import BatchSteps
from orca.bench.kernels.clock import Clock
from orca.bench.main import main as bench
from orca.bench.peers.workload import PeerAnswer, PeerWorkload
from orca.core.domain.errors import SettingError
from orca.core.domain.step import Sampled
from orca.worker.stage.sampling import HostSample
from orca.worker.stage.stage import Stage
from orca.worker.stage.step_runner import PreparedStep, StepOutput

ASKED = Asked(clock=Clock.of(torch.device("cpu"), 1), dtype=torch.float32, copy_bytes_s=1e9)

WIDER = llama(layers=6, hidden=128, intermediate=448, heads=4, kv_heads=2, head_dim=32, vocab=4000)

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

NAMES = {"grpc", "google", "orjson", "redis", "fastapi", "uvicorn", "numba", "tokenizers", "jinja2", "uvloop", "httpx",
         "prometheus_client", "huggingface_hub", "transformers", "matplotlib", "psutil"}
sys.meta_path.insert(0, Missing())
import orca.bench.gpu.command, orca.bench.gpu.parts
assert not NAMES & {name.partition(".")[0] for name in sys.modules}
"""


def test_decode_steps_are_right_and_stand_beside_their_limit() -> None:
    rows = list(decode_rows(ASKED))
    assert [row.name for row in rows] == [
        "step of a small Llama, decode 1 x 40",
        "step of a small Llama, decode 5 x 40",
    ]
    for row, judged in zip(rows, (1, 2), strict=True):
        assert row.is_right
        assert row.result == f"right: {judged * 15} tokens"
        assert row.seconds is not None
        assert row.limit_s is not None
        assert row.host_gap_s is None
        assert row.line.split("right")[0].split()[-1] == "-"


def test_the_trace_is_right_and_hugging_face_gives_the_same_tokens() -> None:
    ours, static, continuous = paper_trace.trace_rows(ASKED)
    tokens = sum(request.new_tokens for request in paper_trace.generate(paper_trace.ON_CPU.spec).requests)
    assert ours.result == f"right: {tokens} tokens"
    for rival in (static, continuous):
        assert rival.result.startswith(f"right: {tokens} tokens; 100% of answers as Orca's")
        assert rival.seconds is not None
        assert ours.seconds is not None
        assert rival.times_faster == rival.seconds / ours.seconds


def test_a_translation_is_right_and_stands_beside_its_limit() -> None:
    [row] = PARTS["translation"](ASKED)
    sizes = translation.ON_CPU
    assert row.result == f"right: {sizes.requests * sizes.new_tokens} tokens"
    assert row.seconds is not None
    assert row.limit_s is not None
    counted = sum(each["times"] for each in row.more["operations"] if each["name"] == "head")
    assert counted == sizes.new_tokens


@pytest.fixture
def a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage draws another token than its logits say: in each step's first row."""
    right = Stage.sample

    def sample(stage: Stage, prepared: PreparedStep, output: StepOutput) -> HostSample:
        first, *others = right(stage, prepared, output).read()
        assert isinstance(first, Sampled)
        wrong = first.token._replace(id=(first.token.id + 1) % SMALL.vocab_size)
        drawn = [replace(first, token=wrong), *others]
        return HostSample(drawn, [each.token.id for each in drawn if isinstance(each, Sampled)])

    monkeypatch.setattr(Stage, "sample", sample)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("a_wrong_token")
@pytest.mark.parametrize("part", list(PARTS))
def test_a_wrong_token_is_reported_and_no_time_is_shown(part: str) -> None:
    first, *_ = PARTS[part](ASKED)
    assert not first.is_right
    assert first.result.startswith("WRONG: ")
    assert first.seconds is None


@pytest.mark.usefixtures("a_wrong_token")
def test_a_wrong_token_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["gpu", "--device", "cpu", "--part", "trace", "--runs", "1"]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert line.startswith("trace of a small Llama, 9 requests: Orca")


def test_another_librarys_failure_is_reported_and_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> PeerAnswer:
        raise RuntimeError("out of memory\nand more")

    def lies(_: Any, workload: PeerWorkload) -> PeerAnswer:
        return PeerAnswer(seconds=0.001, tokens=[[7] * count for count in workload.new_tokens])

    monkeypatch.setattr(paper_trace, "continuous_batching", fails)
    monkeypatch.setattr(paper_trace, "static_batching", lies)
    ours, static, continuous = paper_trace.trace_rows(ASKED)
    assert ours.is_right
    assert continuous.result == "left out: RuntimeError: out of memory"
    assert static.result.startswith("left out: WRONG: ")
    assert static.seconds is static.times_faster is continuous.times_faster is None


def test_requests_that_skip_their_prompts_change_nothing_for_those_that_run_theirs() -> None:
    model = made(SMALL, RandomTensors(dtype=torch.float32, device=torch.device("cpu")))
    prompts = [random_tokens(SMALL, 20, seed) for seed in range(3)]
    alone = BatchSteps(model, prompts[:1], whole=1, new_tokens=6, kv_deviation=1.0)
    among = BatchSteps(model, prompts, whole=1, new_tokens=6, kv_deviation=1.0)
    alone.run(6)
    among.run(6)
    assert among.answers[0] == alone.answers[0]
    assert len(set(alone.answers[0])) > 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_block_of_another_request_is_reported(dtype: torch.dtype) -> None:
    tensors = RandomTensors(dtype=dtype, device=torch.device("cpu"))
    prompts = [random_tokens(WIDER, 100, seed=1)]
    steps = BatchSteps(made(WIDER, tensors), prompts, whole=1, new_tokens=24, kv_deviation=1.0)
    steps.run(1)
    for layer in steps.stage.cache.layers:
        layer[2].copy_(layer[5].clone())  # one of seven that it has
    steps.run(23)
    assert verdict(WIDER, tensors, prompts, [steps.answers[0][:1]], [1]).is_right
    assert not verdict(WIDER, tensors, prompts, steps.answers, [24]).is_right


@pytest.mark.parametrize("library", ["numba", "safetensors"])
def test_without_a_library_its_rows_are_left_out_with_one_line(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert bench(["gpu", "--device", "cpu", "--part", "decode", "--part", "trace", "--runs", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"engine rows: left out, {library} is not installed\n" in printed
    assert "step of a small Llama" not in printed


def test_a_failed_part_is_reported_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Asked) -> Iterator[EngineRow]:
        yield EngineRow(name="first", result="right", seconds=1.0)
        raise MemoryError("none left")

    monkeypatch.setattr(parts, "PARTS", {"decode": fails, "trace": lambda _: iter([EngineRow(name="x", result="y")])})
    figures = engine_figures(ASKED, ["decode", "trace"])
    assert [row["is_right"] for row in figures["decode"]] == [True, False]
    assert len(figures["trace"]) == 1
    printed = capsys.readouterr()
    assert "FAILED: MemoryError: none left" in printed.out
    assert "Traceback" in printed.err


@pytest.mark.slow
def test_the_engine_rows_need_nothing_but_torch_numpy_and_safetensors() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


def test_nothing_is_started_that_could_take_options_of_up() -> None:
    with pytest.raises(SettingError, match="nothing is started here that could take --stages 2"):
        bench(["gpu", "--device", "cpu", "--", "--stages", "2"])
