"""Measuring a profile of tiny models: everything is there and finite. How long it takes is no matter here."""

import dataclasses
import math
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import torch

from orca.bench.parts.tiny_model import write_tiny_model
from orca.bench.peers.model import make_model
from orca.bench.peers.seq2seq.shapes import BartShape, T5Shape
from orca.cli.main import main
from orca.core.domain.errors import EngineError, ModelError, OrcaError, SettingError
from orca.core.domain.model import load_model_info
from orca.planner.profile.measuring.measure import Visits, bounds_of
from orca.planner.profile.measuring.model_key import processor_name, profile_key
from orca.planner.profile.measuring.points import Point, View, all_points, slots_of
from orca.planner.profile.measuring.process_order import ProcessFacts, ProcessOrder, StepTime
from orca.planner.profile.measuring.processes import Processes, running
from orca.planner.profile.measuring.summary import Rounds, degree_times
from orca.planner.profile.measuring.timer import StepTimer
from orca.planner.profile.measuring.views import fewer_layers, view_of
from orca.planner.profile.measuring.weight_bytes import weight_bytes
from orca.planner.profile.profile import Profile, from_json, read_profile, to_json
from orca.planner.profile.profile_cost import stage_costs
from orca.planner.profile.step_shape import LikeRows, StepShape
from orca.worker.models.build import StageModel, load_stage
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard

SHAPE = StepShape(increments=3, context=20, prompts=(LikeRows(1, 9, 2),), sampled=3)
SEQ2SEQ = {
    "t5": T5Shape(layers=3, hidden=48, heads=3, head_dim=16, intermediate=80, vocab=300),
    "bart": BartShape(layers=3, hidden=48, heads=3, intermediate=80, vocab=300, positions=128),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama") / "llama")


def seq2seq(kind: str, folder: Path) -> Path:
    make_model(folder / kind, SEQ2SEQ[kind])
    return folder / kind


def numbers(content: Any) -> list[float]:
    if isinstance(content, dict):
        return [number for each in content.values() for number in numbers(each)]
    if isinstance(content, list | tuple):
        return [number for each in content for number in numbers(each)]
    return [content] if isinstance(content, int | float) else []


def measured_here(folder: Path) -> Profile:
    """Time each small point twice in this process, and return the profile."""
    torch.set_grad_enabled(False)
    info = load_model_info(folder)
    key = profile_key(info, device="cpu", threads=1, ranks=(1,), devices=1, release="test")
    model, progress = load_stage(info), RankProgress()
    bounds = bounds_of(info, key, 1, kv_bytes=0, sends=False)
    points = [each for each in all_points(bounds, has_fewer=fewer_layers(model) > 0) if each.is_small]
    timers = {
        view: StepTimer(view_of(model, view), slots=slots_of(points, view), progress=progress)
        for view in dict.fromkeys(point.view for point in points)
    }
    times = {}
    for point in points:
        timers[point.view].begin(point)
        times[point] = [timers[point.view].again(point) for _ in range(2)]
        assert all(0 < each.compute_us < each.total_us for each in times[point])
    facts = ProcessFacts(
        layers=len(model.layers),
        fewer_layers=fewer_layers(model),
        kv_bytes_per_slot=model.kv_bytes_per_slot // len(model.layers),
        weights=weight_bytes(model, lambda place: load_stage(info, place)),
    )
    degree = degree_times(Rounds(bounds, facts, times), encoder_layers=model.encoder_layers)
    return Profile(key=key, digest=key.digest, seconds=1.0, device_bytes=1, send=None, host=None, degrees=(degree,))


@pytest.mark.parametrize("kind", ["llama", *SEQ2SEQ])
def test_every_part_of_a_model_has_times(kind: str, llama: Path, tmp_path: Path) -> None:
    profile = measured_here(llama if kind == "llama" else seq2seq(kind, tmp_path))
    assert from_json(to_json(profile), "p") == profile
    assert all(math.isfinite(number) for number in numbers(dataclasses.asdict(profile)))
    [degree] = profile.degrees
    for stack in degree.stacks:  # a difference of two times may be below 0 on a busy machine
        assert stack.rest.at[:2] == (1, 2)
        assert all(time.repeats == 2 for time in stack.rest.times)
    assert all(time.us > 0 for time in degree.step.times)
    assert min(*degree.weight_bytes_per_layer, degree.embed_bytes, degree.head_bytes, degree.kv_bytes_per_slot) > 0
    [cost] = stage_costs(profile, (profile.key.num_layers,), 1)
    assert cost.shape_us(SHAPE) > 0


def test_the_bytes_of_the_parts_add_up_to_those_of_the_model(llama: Path, tmp_path: Path) -> None:
    for folder in (llama, seq2seq("t5", tmp_path)):
        model = load_stage(folder)

        def load(place: Shard, folder: Path = folder) -> StageModel:
            return load_stage(folder, place)

        found = weight_bytes(model, load)
        counts = (3, 3) if len(found.layers) == 2 else (3,)
        in_layers = sum(count * each for count, each in zip(counts, found.layers, strict=True))
        assert found.embed + in_layers + found.head == model.weight_bytes
        assert found.embed >= 4 * model.config.vocab_size * model.config.hidden_size


def test_a_model_of_one_layer_has_a_profile_too(tmp_path: Path) -> None:
    profile = measured_here(write_tiny_model(tmp_path / "one", layers=1))
    assert profile.degrees[0].weight_bytes_per_layer[0] > 0
    assert stage_costs(profile, (1,), 1)[0].shape_us(SHAPE) > 0


def test_views_share_the_weights_of_the_model(llama: Path) -> None:
    model = load_stage(llama)
    counts = {view: len(view_of(model, view).layers) for view in View if view not in (View.ALL_REDUCE, View.SEND)}
    assert counts == {
        View.ENCODER: 0,
        View.LAYERS: 3,
        View.FEWER: 1,
        View.HEADED: 3,
        View.KEPT: 1,
        View.EMBEDDED: 1,
        View.BARE: 1,
    }
    for view in (View.LAYERS, View.HEADED, View.KEPT, View.BARE):
        part = view_of(model, view)
        assert (part.head is not None) == part.shard.is_last == (view in (View.HEADED, View.KEPT))
        assert (part.embed is not None) == (view is not View.BARE)
        assert part.layers[0] is model.layers[0]


def test_the_command_measures_ranks_and_their_links(llama: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "profile.json"
    flags = ["--devices", "2", "--ranks", "2", "--threads", "1", "--minutes", "0.01", "--host", "false"]
    assert main(["profile", "--model", str(llama), "--out", str(out), *flags]) == 0
    shown = capsys.readouterr()
    assert "left out because --minutes is too short" in shown.err
    assert "round 1 took" in shown.err
    assert "all-reduce" in shown.out
    profile = read_profile(out)
    assert profile.digest in shown.out
    assert (profile.key.ranks, profile.key.devices, profile.key.threads) == ((2,), 2, 1)
    assert profile.degrees[0].all_reduce is not None
    assert profile.send is not None
    assert all(time.us > 0 for curve in (profile.degrees[0].all_reduce, profile.send) for time in curve.times)
    assert len(stage_costs(profile, (1, 2), 2)) == 2
    assert list(tmp_path.iterdir()) == [out], "nothing else is left"


class SlowProcesses:
    """Measuring processes that take long for every step."""

    def __init__(self) -> None:
        self.visits: list[tuple[Point, int]] = []

    def visit(self, index: int, point: Point, repeats: int) -> StepTime:  # noqa: ARG002
        self.visits.append((point, repeats))
        return StepTime(1e6, 1e6)


def test_a_slow_step_is_not_taken_for_the_one_that_brings_its_sources(tmp_path: Path) -> None:
    folder = seq2seq("t5", tmp_path)
    info = load_model_info(folder)
    key = profile_key(info, device="cpu", threads=1, ranks=(1,), devices=1, release="test")
    points = all_points(bounds_of(info, key, 1, kv_bytes=1 << 30, sends=False), has_fewer=True)
    processes = SlowProcesses()
    times = Visits(cast("Processes", processes), points, "stages", lambda _: None).run(time.monotonic() + 60)
    assert times.keys() == set(points)
    repeats = {
        brings: {n for point, n in processes.visits if point.brings_sources is brings} for brings in (True, False)
    }
    assert repeats == {True: {1}, False: {0}}


def refusal(capsys: Any, *flags: str) -> str:
    assert main(["profile", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("orca profile: ")
    assert said.count("\n") == 1
    return str(said)


def test_ranks_that_the_model_or_the_devices_do_not_have_are_refused(llama: Path, tmp_path: Path, capsys: Any) -> None:
    common = ("--model", str(llama), "--out", str(tmp_path / "p"))
    said = refusal(capsys, *common, "--devices", "8", "--ranks", "8")
    assert "--ranks 8 is more than the 4 attention heads that ranks divide" in said
    if not torch.cuda.is_available():
        said = refusal(capsys, *common, "--device", "cuda")
        assert "--device cuda: --devices is 1, and this machine has 0 GPUs" in said
    said = refusal(capsys, *common, "--ranks", "1,2")
    assert "--ranks 2 is more than --devices 1: each rank needs a device" in said


def test_a_process_that_fails_is_reported_with_its_reason(llama: Path, tmp_path: Path) -> None:
    order = ProcessOrder(
        model=str(llama),
        dtype="float32",
        quantization=None,
        device="cpu",
        threads=1,
        number=0,
        processes=1,
        folder=str(tmp_path),
        bounds={"ranks": 1},
    )
    with pytest.raises(EngineError, match=r"TypeError: PointBounds\.__init__"), running([order]):
        pass


@pytest.mark.parametrize("kind", [ModelError, SettingError])
def test_a_process_that_refuses_the_model_passes_on_what_is_wrong(kind: type[OrcaError]) -> None:
    ours, theirs = Pipe()
    theirs.send_bytes(orjson.dumps({"kind": kind.__name__, "error": "it has no config.json"}))
    with pytest.raises(kind, match=r"^it has no config\.json$"):
        Processes([ours], 1)


def test_a_process_that_dies_is_named() -> None:
    ours, theirs = Pipe()
    theirs.close()
    silent, _other = Pipe()
    with pytest.raises(EngineError, match="measuring process 1 has died"):
        Processes([silent, ours], 1)  # the first one may wait for the one that died


def test_without_the_libraries_of_a_worker_the_missing_one_is_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "orca.planner.profile.measuring.measure")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["profile", "--model", str(llama), "--out", str(tmp_path / "p")]) == 2
    assert capsys.readouterr().err == "orca profile: torch is missing: install orca-serving[worker]\n"


def test_the_key_names_the_processor_of_this_machine(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "cpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Some  Processor\nstepping\t: 2\n\nmodel name: x\n"
    )
    assert processor_name(cpuinfo) == "Some Processor (6-207-2)"
    cpuinfo.write_text("")
    assert processor_name(cpuinfo) == "unknown processor"


def test_a_profile_of_another_model_is_refused_by_the_field(llama: Path, tmp_path: Path) -> None:
    keys = [
        profile_key(load_model_info(folder), device="cpu", threads=1, ranks=(1,), devices=1, release="test")
        for folder in (llama, seq2seq("t5", tmp_path))
    ]
    profile = measured_here(llama)
    profile.check_key(keys[0])
    with pytest.raises(SettingError, match="its architecture is 'llama', not 't5'"):
        profile.check_key(keys[1])
