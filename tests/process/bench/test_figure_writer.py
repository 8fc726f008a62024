"""Figures that `--figures FILE` appends have the processor, the day, the commit and the command."""

import subprocess
from pathlib import Path

import pytest

from orca.bench.figures.figure import read_file
from orca.bench.figures.origin import commit, processor, shown_command
from orca.bench.figures.writer import append, measured
from orca.bench.gpu.command import main as gpu
from orca.bench.gpu.command import measured_figures
from orca.bench.host.commits import CommitFigures
from orca.bench.host.events import StreamFigures
from orca.bench.host.figures import figures as host_figures
from orca.bench.host.run import HostFigures
from orca.bench.main import main as bench
from orca.bench.simulate import main as simulate

MILAN = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7763 64-Core Processor\n"
GENOA = MILAN.replace("model\t\t: 1\n", "model\t\t: 17\n")
TURIN = MILAN.replace("cpu family\t: 25", "cpu family\t: 26")
ROME = MILAN.replace("cpu family\t: 25", "cpu family\t: 23").replace("7763", "7742")
XEON = "vendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Processor @ 2.70GHz\nflags\t\t: fpu amx_tile\n"


def test_figures_are_appended_with_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "host.jsonl"
    words = ["orca", "bench", "host", "--figures", str(file), "--batch-sizes", "16"]
    for value in (10, 20):
        append(file, [measured("Speed", [value, value + 2], "tokens/s", {"batch": 16, "none": None})], words=words)
    first, second = read_file(file)
    assert (first.value, first.spread, first.runs, first.settings) == (11, (10, 12), 2, {"batch": 16})
    assert second.value == 21
    assert first.processor == processor()
    assert first.command == "orca bench host --batch-sizes 16"
    assert first.commit == commit()


def test_nothing_is_written_unless_asked_for() -> None:
    append(None, [measured("Speed", 1, "tokens/s", {})], words=["orca"])


def test_values_keep_four_digits_and_take_their_unit() -> None:
    figure = measured("Time", 0.0123456, "ms", {}, scale=1000, runs=5)
    assert (figure.value, figure.spread, figure.runs) == (12.35, None, 5)


def test_a_named_device_replaces_the_processor(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    append(file, [measured("Time", 1.0, "ms", {})], words=["x"], device="NVIDIA H100")
    assert read_file(file)[0].processor == "NVIDIA H100"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["orca", "bench", "peers", "--openvino", "/opt/x/bin/python"], "orca bench peers --openvino PATH"),
        (["orca", "--openvino=/opt/python", "--rounds=2"], "orca --openvino=PATH --rounds=2"),
        (["orca", "--json", "a.json", "--plot=b.svg", "--figures", "c", "--rate", "1"], "orca --rate 1"),
        (["orca", "--api-key", "secret", "--url=https://example.org/"], "orca --api-key KEY --url URL"),
        (["orca", "--new-tokens", "8:16", "--", "--stages", "2"], "orca --new-tokens 8:16 -- --stages 2"),
    ],
)
def test_a_command_shows_no_path_key_or_address(words: list[str], shown: str) -> None:
    assert shown_command(words) == shown


@pytest.mark.parametrize(
    ("cpuinfo", "cores", "name"),
    [
        (MILAN, 2, "AMD Zen 3, 2 cores"),
        (GENOA, 16, "AMD Zen 4, 16 cores"),
        (TURIN, 2, "AMD Zen 5, 2 cores"),
        (ROME, 1, "AMD EPYC 7742, 1 core"),
        (XEON, 2, "Intel Xeon with AMX, 2 cores"),
        (XEON.replace(" amx_tile", ""), 2, "Intel Xeon, 2 cores"),
        ("model name\t: Neoverse-N1\n\nmodel name\t: other\n", 4, "Neoverse-N1, 4 cores"),
        ("processor\t: 0\n", 2, "unknown processor, 2 cores"),
    ],
)
def test_a_processor_has_a_short_name(cpuinfo: str, cores: int, name: str) -> None:
    assert processor(cpuinfo, cores) == name


def test_a_commit_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *named, *words], cwd=tmp_path, check=True, capture_output=True)

    assert commit(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    clean = commit(tmp_path)
    assert clean is not None
    assert len(clean) >= 7
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{clean}-dirty"


def test_a_simulation_appends_its_points_and_depends_on_no_processor(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    assert simulate(["--requests", "4", "--rates", "1", "--policies", "iteration", "--figures", str(file)]) == 0
    speed, latency, first = read_file(file)
    assert (speed.what, latency.what, first.what) == (
        "Requests per second",
        "Median time per token",
        "Time to first token, p99",
    )
    assert speed.processor == "virtual time"
    assert speed.settings == {
        "engine": "simulated",
        "model": "175b",
        "lengths": "paper",
        "policy": "iteration",
        "max_batch": 8,
        "rate_per_s": 1.0,
    }


def test_the_host_bench_records_figures_of_one_processor() -> None:
    committed = CommitFigures(
        schedulers=2,
        batch_size=64,
        step_us=0,
        requests=10,
        tokens=1000,
        least_tokens=400,
        steps=20,
        seconds=0.5,
        scheduler_s=0.4,
        redis_s=0.2,
        waiting=1000,
        waiting_bytes=860,
    )
    streamed = StreamFigures(
        gateways=1,
        streams=64,
        waiting=0,
        tokens_per_s=2000.0,
        events=100,
        pieces=90,
        seconds=0.1,
        gateway_s=0.05,
        scheduler_s=0.01,
        redis_s=0.02,
    )
    figures = {figure.what: figure for figure in host_figures(HostFigures([committed], [streamed]))}
    assert figures["Tokens committed per second"].value == 2000
    assert figures["Scheduler time per token"].value == 400
    assert figures["Tokens per second if each scheduler had a processor"].value == 5000
    assert figures["Tokens per second if Redis had a processor"].value == 5000
    assert figures["Memory of Redis per waiting request"].value == 860
    assert figures["Gateway time per event"].value == 500
    assert figures["Events per second"].settings == {"streams": 64, "waiting": 0, "gateways": 1, "asked_per_s": 2000}


def test_the_engine_bench_records_each_batch(tmp_path: Path) -> None:
    file = tmp_path / "engine.jsonl"
    batches = ["--batch-sizes", "1,4", "--prompt-tokens", "8", "--new-tokens", "4"]
    assert bench(["engine", "--engine", "simulated", *batches, "--figures", str(file)]) == 0
    speeds = [figure for figure in read_file(file) if figure.what == "Generated tokens per second"]
    assert [figure.settings["batch"] for figure in speeds] == [1, 4]
    assert speeds[0].command.startswith("orca bench engine --engine simulated")


def test_the_gpu_bench_records_times_only_of_right_results() -> None:
    row = {"name": "attention", "is_right": True, "seconds": 0.002, "limit_s": 0.001, "rival_s": 0.003}
    step = {"name": "step", "is_right": True, "seconds": 0.01, "limit_s": None, "host_gap_s": 0.0001}
    wrong = {**row, "name": "norm", "is_right": False}
    figures = measured_figures({"dtype": "torch.bfloat16", "operations": [row, wrong], "decode": [step]})
    assert [(figure.what, figure.settings["run"], figure.value) for figure in figures] == [
        ("Time of a run", "attention", 2),
        ("Share of the limit", "attention", 50),
        ("Speed against PyTorch's", "attention", 1.5),
        ("Time of a run", "step", 10),
        ("Host gap between two steps", "step", 0.1),
    ]
    assert figures[0].settings["dtype"] == "bfloat16"


def test_times_of_an_interpreter_are_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu(["--device", "cpu", "--figures", str(tmp_path / "gpu.jsonl")]) == 2
    assert "--figures needs a GPU" in capsys.readouterr().err
