"""`orca bench grammars`: a matcher alone, the engine on both sides, and what is shown of both."""

import asyncio
from pathlib import Path

import pytest

from orca.bench.client import LoadTarget
from orca.bench.figures.writer import append
from orca.bench.parts import grammars
from orca.bench.parts import hostile_neighbours as neighbours
from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.bench.peers.workload import PeerWorkload
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import TraceSpec, generate


def test_a_matcher_takes_random_tokens_of_the_schema() -> None:
    times = grammars.time_matcher(300, 25)
    assert (times.vocab, len(times.token_s)) == (300, 25)


def test_both_sides_of_the_engine_run_by_turns_and_are_shown(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=1, vocab_size=300)
    trace = generate(TraceSpec(requests=4, prompt_tokens=Range(3, 9), new_tokens=Range(2, 6), seed=5))
    workload = PeerWorkload.of(trace, folder, 300, batch_size=3, threads=1)
    speeds = grammars.measure_engine(folder, workload, rounds=2)
    assert len(speeds.free) == len(speeds.constrained) == len(speeds.ratios) == 2
    matchers = [grammars.MatcherTimes(vocab=300, read_s=0.5, build_s=0.002, token_s=[1e-5, 2e-5, 3e-5])]
    fixed = grammars.EngineSpeeds(free=[100.0, 200.0], constrained=[90.0, 190.0])
    assert grammars.lines(matchers, fixed)[1].split() == ["300", "500.0", "2.00", "20.0", "30"]
    figures = grammars.figures(matchers, fixed, {"model": "tiny"})
    assert {figure.what: figure.value for figure in figures}["Time of a masked token"] == pytest.approx(20)
    assert [figure.value for figure in figures if figure.what == "Speed under a schema"] == [pytest.approx(92.5)]
    assert grammars.to_json(matchers, fixed)["free_tokens_per_s"] == [100.0, 200.0]


def test_growth_is_the_slope_after_the_caches_are_full() -> None:
    found = neighbours.HostileFigures(load=neighbours.HostileLoad(seconds=400))
    found.memory_mib["rank"] += [(at, 500 + at / 3600) for at in range(100, 401, 20)]
    found.memory_mib["gateway"] += [(50.0, 90.0), (300.0, 200.0)]
    assert found.growth_mib_per_h("rank") == pytest.approx(1)
    assert found.growth_mib_per_h("gateway") == 0


async def test_a_wrong_answer_to_a_grammar_ends_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    open_streams = 0

    async def stream(*_: object) -> list[float]:
        nonlocal open_streams
        open_streams += 1
        try:
            await asyncio.Event().wait()
        finally:
            open_streams -= 1
        return []

    async def send(*_: object) -> None:
        await asyncio.sleep(0)
        assert open_streams == 3
        raise neighbours.HostileFailed("a grammar was answered with 500")

    load = neighbours.HostileLoad(seconds=600, phase_s=600, clients=3)
    monkeypatch.setattr(neighbours, "_stream", stream)
    monkeypatch.setattr(neighbours, "_send_hostile", send)
    found = neighbours.HostileFigures(load=load)
    target = LoadTarget(url="http://127.0.0.1:1", model="tiny", vocab_size=300)
    with pytest.raises(neighbours.HostileFailed, match="500"):
        await neighbours._turn(target, load, [[1]] * 3, iter([{"regex": "a"}]), found)
    assert open_streams == 0


@pytest.mark.slow
async def test_clients_beside_hostile_grammars_get_their_own_tokens(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", vocab_size=300, max_position_embeddings=256)
    load = neighbours.HostileLoad(seconds=2.0, phase_s=1.0, clients=2, new_tokens=10, interval_s=0.1)
    found = await neighbours.measure(str(folder), load, tmp_path, [], 300)
    assert found.refusals_s
    assert found.ratios
    assert {role: samples[-1][1] > 20 for role, samples in found.memory_mib.items()} == {"gateway": True, "rank": True}
    assert [line.split()[0] for line in neighbours.lines(found)][:3] == ["grammars", "p99", "ratio"]
    append(tmp_path / "figures.jsonl", neighbours.figures(found, {"model": "tiny"}), words=["orca", "bench"])
    assert {each.what for each in neighbours.figures(found, {"model": "tiny"})} == {
        "Gaps between tokens beside hostile grammars",
        "Slowest refusal of a hostile grammar",
        "Growth of memory",
    }
    assert neighbours.to_json(found)["refused"] == len(found.refusals_s)
