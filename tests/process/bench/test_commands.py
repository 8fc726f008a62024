"""The command lines of `orca bench` and `orca simulate`."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from orca.bench.main import main as bench
from orca.bench.peers.model import LlamaShape, make_model
from orca.bench.simulate import main as simulate
from orca.bench.sweep import baseline_flags, cycle_flags
from orca.bench.system import ServerFailed, running_system
from orca.core.domain.errors import ModelError, SettingError
from orca.core.process.ports import free_port
from orca.scheduler.policy.cycle import CycleControls
from orca.scheduler.policy.request_level import Habits, RequestLevelPolicy
from support.bench.fake_completions import HEAD, chunk, event, serving, token

TINY = LlamaShape(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=48, vocab=300, positions=64)
SHORT = ["--requests", "5", "--preset", "small"]


def test_simulate_shows_the_whole_report_of_a_single_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(["--policies", "iteration", "--rates", "4", *SHORT]) == 0
    shown = capsys.readouterr().out
    assert "iteration(8) at 4 requests/s" in shown
    assert "time to first token" in shown


def test_a_trace_has_the_lengths_of_a_task_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (past := tmp_path / "past.csv").write_text("prompt,output\n40,8\n80,12\n")
    for lengths, shown in (
        (["--task", "S", "--lengths-scale", "0.25"], "cannot be a moment"),
        (["--lengths", str(past)], "p99 12"),
    ):
        assert simulate(["--policies", "iteration", "--rates", "4", "--requests", "5", *lengths]) == 0
        assert shown in capsys.readouterr().err


def test_a_simulated_sweep_writes_its_points_and_draws_them(tmp_path: Path) -> None:
    json_file, plot = tmp_path / "points.json", tmp_path / "curves.png"
    files = ["--json", str(json_file), "--plot", str(plot)]
    sizes = ["--max-batch-sizes", "1,4", "--rates", "1,2,4"]
    assert bench(["sweep", "--engine", "simulated", *sizes, *SHORT, *files]) == 0
    points = json.loads(json_file.read_text())
    assert len(points) == 2 * 2 * 3
    assert {point["report"]["requests"] for point in points} == {5}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_habits_of_the_baseline_can_be_switched_off_and_those_in_force_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def medians(*flags: str) -> list[float]:
        file = tmp_path / "points.json"
        assert simulate(["--rates", "1", *SHORT, "--json", str(file), *flags]) == 0
        points = json.loads(file.read_text())
        assert all(point["scheduling"] in capsys.readouterr().out for point in points[-1:])
        return [point["report"]["ttft_s"]["p50"] for point in points if point["policy"] == "request_level"]

    [whole], [early] = medians(), medians("--without-habits", "holds_results,computes_ended")
    assert early < whole, "the first token does not wait for the last one of the batch"
    assert simulate(["--rates", "1", *SHORT, "--without-habits", "holds_results,computes_ended"]) == 0
    named = "request_level(microbatch=whole batch; habits: starts_at_shortest, splits_batch, reserves_full_length)"
    assert named in capsys.readouterr().out


def test_the_measured_baseline_is_passed_to_orca_up() -> None:
    chosen = RequestLevelPolicy(microbatch_size=2, habits=Habits.without(["splits_batch"]))
    assert baseline_flags(chosen) == ["--microbatch-size", "2", "--without-habits", "splits_batch"]
    assert baseline_flags(RequestLevelPolicy()) == []


def test_the_controls_of_a_cycle_are_named_and_passed_to_orca_up(capsys: pytest.CaptureFixture[str]) -> None:
    controls = ["--encode-batch", "4", "--decode-steps", "9", "--decode-batch", "7"]
    assert simulate(["--policies", "iteration,rra", *controls, "--rates", "1,2", *SHORT]) == 0
    shown = capsys.readouterr().out
    assert "rra(encode_batch 4, decode_steps 9, decode_batch 7, threshold_percent 12)" in shown
    assert "rra(8)" in shown
    cycle = CycleControls(encode_batch=4, decode_steps=9, decode_batch=7)
    assert cycle_flags(cycle) == [*controls, "--threshold-percent", "12"]


def test_a_figure_of_a_cycle_has_its_controls(tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    controls = ["--policies", "rra", "--encode-batch", "4", "--decode-steps", "9", "--rates", "1"]
    options = ["--engine", "simulated", "--max-batch-sizes", "8", *controls, *SHORT]
    assert bench(["sweep", *options, "--figures", str(file)]) == 0
    assert "rra(encode_batch 4, decode_steps 9)" in file.read_text()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policies", "rra"], "the policy rra needs --encode-batch"),
        (["--policies", "rra", "--encode-batch", "4"], "the policy rra needs --decode-steps"),
        (["--encode-batch", "4"], "--encode-batch is an option of the policy rra; add it to --policies"),
        (["--policies", "rra", "--encode-batch", "0", "--decode-steps", "1"], "encode_batch must be at least 1"),
        (
            ["--policies", "rra", "--encode-batch", "17", "--decode-steps", "1"],
            r"encode_batch \(17\) must be at most 16",
        ),
        (["--policies", "fly"], "--policies takes any of iteration, request_level, rra, not fly"),
    ],
)
def test_controls_that_make_no_sense_are_refused_by_name(flags: list[str], complaint: str) -> None:
    for command in (simulate, lambda options: bench(["sweep", "--engine", "simulated", *options])):
        with pytest.raises(SettingError, match=complaint):
            command([*flags, "--max-batch-sizes", "8", "--rates", "1", *SHORT])


def test_a_homogeneous_sweep_does_not_normalise_latency(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engine", "simulated", "--rates", "1,2,4", "--max-batch-sizes", "2", "--requests", "5"]
    assert bench(["homogeneous", *options]) == 0
    shown = capsys.readouterr().out
    assert "median latency ms" in shown
    assert "ms/token" not in shown


def test_lengths_may_be_normal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    lengths = ["--prompt-tokens", "1:256:128:81", "--new-tokens", "1:320:128:68"]
    options = ["--engine", "simulated", "--policies", "iteration", "--rates", "1", "--max-batch-sizes", "2"]
    assert bench(["sweep", *options, *lengths, "--requests", "5", "--figures", str(file)]) == 0
    assert "iteration(2)" in capsys.readouterr().out
    assert "N(128,81;1,256) in, N(128,68;1,320) out" in file.read_text()


def test_the_costs_of_the_simulated_engine_can_be_chosen(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    costs = ["--stages", "3", "--step-us", "1000", "--token-us", "0", "--context-ns", "0"]
    batches = ["--batch-sizes", "2", "--prompt-tokens", "8", "--new-tokens", "4"]
    picture = tmp_path / "times.svg"
    files = ["--json", str(file), "--plot", str(picture)]
    assert bench(["engine", "--engine", "simulated", *costs, *batches, *files]) == 0
    [time] = json.loads(file.read_text())
    assert time["seconds"] == pytest.approx(4 * 3 * 0.001)
    assert "<svg" in picture.read_text()


@pytest.mark.slow
def test_the_engine_is_measured_with_weights_of_8_bits(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TINY)
    sizes = ["--batch-sizes", "2", "--prompt-tokens", "8", "--new-tokens", "3", "--rounds", "1"]
    file = tmp_path / "report.json"
    model = ["--model", str(tmp_path / "model"), "--dtype", "bfloat16", "--quantization", "int8"]
    assert bench(["engine", *model, *sizes, "--json", str(file)]) == 0
    assert len(json.loads(file.read_text())) == 1


async def test_serve_measures_a_running_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        tokens = [token(number) for number in range(int(str(body["max_tokens"])))]
        writer.write(HEAD + chunk(b"".join(tokens) + event(b"[DONE]")))

    file = tmp_path / "report.json"
    async with serving(answer) as target:
        line = ["serve", "--url", target.url, "--model", "m", *SHORT, "--json", str(file)]
        assert await asyncio.to_thread(bench, line) == 0
    assert json.loads(file.read_text())["requests"] == 5
    assert "generated tokens/s" in capsys.readouterr().out


async def test_serve_fails_when_a_request_does(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 503 -\r\n\r\n{"error": {"message": "the pool is away"}}')

    async with serving(refuse) as target:
        line = ["serve", "--url", target.url, "--model", "m", *SHORT]
        assert await asyncio.to_thread(bench, line) == 1
    shown = capsys.readouterr()
    assert "5 failed: HTTP 503: the pool is away" in shown.out
    assert "5 of 5 requests failed" in shown.err


def test_serve_reports_an_unreachable_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["serve", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["sweep", "--rates", "fast"], "--rates"),
        (["sweep", "--engine", "simulated", "--policies", "newest_first"], "not newest_first"),
        (["sweep", "--engine", "simulated", "--stages", "0"], "--stages must be at least 1, not 0"),
        (["sweep", "--engine", "simulated", "--requests", "0"], "--requests: 0 is not above 0"),
        (["sweep", "--slots", "64"], "--slots is an option of the simulated engine"),
        (["homogeneous", "--prefetch", "1"], "--prefetch is an option of the simulated engine"),
        (["engine", "--step-us", "5"], "--step-us is an option of the simulated engine"),
        (["sweep", "--without-habits", "haste"], "--without-habits takes any of holds_results.*, not haste"),
        (["serve", "--rate", "0"], "--rate: 0 is not above 0"),
        (["serve", "--rate", "inf"], "--rate: inf is not a finite number"),
        (["serve", "--timeout", "nan"], "--timeout: nan is not a finite number"),
        (["serve", "--vocab-size", "0"], "--vocab-size: 0 is not above 0"),
        (["serve", "--new-tokens", "5:a"], "--new-tokens: lengths are N, N:M or N:M:MEAN:SD, in numbers, not '5:a'"),
        (["serve", "--preset", "huge"], "--preset"),
        (["sweep", "--task", "S", "--prompt-tokens", "3"], "--task and --prompt-tokens each name lengths"),
        (["serve", "--task", "S", "--preset", "small"], "--task and --preset each name lengths"),
        (["serve", "--task", "S", "--lengths", "past.csv"], "--task and --lengths each name lengths"),
        (["serve", "--lengths", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["serve", "--lengths-scale", "0.5"], "--lengths-scale is a factor of --task or --lengths"),
        (["serve", "--task", "S", "--lengths-scale", "0.01"], "--task S: the scale of a task's lengths"),
        (["serve", "--task", "Z"], "--task"),
        (["serve", "--prompt-tokens", "9:3"], "--prompt-tokens: .* 1 <= low <= high, not 9..3"),
        (["serve", "--new-tokens", "1:9:20:2"], "--new-tokens: the mean of lengths from 1 to 9 .*, not 20"),
        (
            ["serve", "--new-tokens", "1:9:5"],
            "--new-tokens: lengths are N, N:M or N:M:MEAN:SD, in numbers, not '1:9:5'",
        ),
        (["serve", "--", "--stages", "2"], "does not start `orca up`, which could take --stages 2"),
        (["sweep", "--rates", "1,0"], "--rates: 0 is not above 0"),
        (["engine", "--batch-sizes", "0"], "--batch-sizes: 0 is not above 0"),
        (["host", "--waiting", "0,-1"], "--waiting: -1 is below 0"),
        (["host", "--step-us", "-5"], "--step-us: -5 is below 0"),
        (["peers", "--batch-size", "0"], "--batch-size: 0 is not above 0"),
        (["peers", "--openvino", "/no/such/python"], "--openvino: /no/such/python is not a program"),
        (["peers", "--openvino", "/etc/passwd"], "--openvino: /etc/passwd is not a program"),
        (["peers", "--openvino", "/bin"], "--openvino: /bin is not a program"),
        (["peers", "--vllm", "/bin"], "--vllm: /bin is not a program"),
        (["overload", "--gateway-process", "4194305"], "--gateway-process: there is no process 4194305"),
        (["overload", "--retries", "-1"], "--retries: -1 is below 0"),
        (["engine", "--new-tokens", "none"], "--new-tokens: invalid int value: 'none'"),
        (["unheard-of"], "unheard-of"),
        (["serve", "--json", "/no/such/x"], "--json: /no/such/x: there is no folder /no/such"),
        (["engine", "--json", "/dev"], "--json: /dev is a folder"),
        (["sweep", "--plot", "/no/such/x.png"], "--plot: /no/such/x.png: there is no folder /no/such"),
        (["sweep", "--plot", "x.tiff"], "--plot: x.tiff does not end in .png, .svg, .pdf"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(line: list[str], complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        bench(line)


@pytest.mark.parametrize("action", ["sweep", "peers"])
@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("./no-such-model", "is neither a folder nor a model that ships"),
        (__file__, "is a file"),
        ("/", "no config.json"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_anything_runs(action: str, model: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        bench([action, "--model", model])


async def test_a_system_that_does_not_start_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match=r"ended with 2:(?s:.)*no-such-model"):
        async with running_system("./no-such-model", [], tmp_path, vocab_size=1):
            raise AssertionError("it started")


def test_a_plot_without_matplotlib_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = ["--rates", "1", *SHORT, "--plot", str(tmp_path / "x.png")]
    with pytest.raises(SettingError, match=r"--plot: pictures need matplotlib: pip install 'orca-serving\[bench\]'"):
        simulate(line)
    assert not capsys.readouterr().out
