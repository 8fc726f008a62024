"""The output of `orca bench peers`: figures, ratios, latencies, memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from orca.bench.peers.compare import systems
from orca.bench.peers.comparison import PeerComparison
from orca.bench.peers.figures import SYSTEMS, figures
from orca.bench.peers.judgement import Judgement
from orca.bench.peers.memory import ProcessPeak, RankMemory
from orca.bench.peers.results import (
    CONTINUOUS,
    ENGINE,
    OPENVINO_DEFAULT,
    ORCA,
    STATIC,
    Latencies,
    PeerResult,
    PeerRound,
)
from orca.bench.peers.table import lines, to_json
from orca.bench.peers.workload import PeerAnswer
from support.bench.peer_runs import some_comparison

MIB = 2**20


def comparison(rate: float | None = None) -> PeerComparison:
    return some_comparison(rate, up_options=["--stages", "1"])


def result_of(name: str, *speeds: float) -> PeerResult:
    verdict = Judgement(tokens=10, excused=0, wrong=0, wrong_counts=0)
    return PeerResult(name, list(speeds), [[[1, 2], [3]]] * len(speeds), [verdict] * len(speeds))


def timed(name: str, *rounds: PeerAnswer) -> PeerResult:
    """A system that was asked for two and for one token."""
    result = result_of(name)
    for answer in rounds:
        result.add(PeerRound(answer=answer, memory=[]), [2, 1])
    result.judgements = result_of(name, 1).judgements
    return result


def answer(first_s: list[float], last_s: list[float]) -> PeerAnswer:
    return PeerAnswer(seconds=1.0, tokens=[[1, 2], [3]], first_s=first_s, last_s=last_s)


def test_the_table_shows_medians_spreads_and_ratios() -> None:
    results = [result_of(STATIC, 90, 100, 250), result_of(CONTINUOUS, 150, 125, 140), result_of(ORCA, 280, 300, 400)]
    results[1].answers[-1] = [[1, 2], [4]]
    table = lines(comparison(), results)
    assert table[1].split()[2:6] == ["100.0", "90.0", "250.0", "3.00"]
    assert table[2].split()[2:6] == ["140.0", "125.0", "150.0", "2.14"]
    assert table[4].startswith("2 of 2 requests: the same tokens")
    assert table[5].startswith("1 of 2 requests: the same tokens")


def test_latencies_count_from_the_arrival_and_per_token() -> None:
    latencies = Latencies.of(answer([0.1, 0.3], [0.5, 0.3]), [2, 1])
    assert latencies is not None
    assert latencies.first_token_s.p50 == pytest.approx(0.2)
    assert (latencies.normalised_s.p50, latencies.normalised_s.max) == pytest.approx((0.275, 0.3))


def test_a_system_without_token_times_has_no_latencies() -> None:
    assert Latencies.of(PeerAnswer(seconds=1.0, tokens=[[1, 2], [3]]), [2, 1]) is None


def test_with_a_rate_the_table_shows_medians_of_latencies_and_what_orca_takes() -> None:
    slow, fast = answer([0.1, 0.1], [0.4, 0.2]), answer([0.05, 0.05], [0.1, 0.05])
    table = lines(comparison(rate=2.0), [timed(ENGINE, slow, slow, fast), timed(ORCA, fast, slow, fast)])
    assert table[2].split()[2:10] == ["100.0", "100.0", "0.50", "x", "200.0", "200.0", "0.25", "x"]
    assert table[3].split()[3:7] == ["50.0", "50.0", "50.0", "50.0"]
    assert table[4].startswith("transformers takes no part")


@pytest.mark.parametrize(("rate", "only_judges"), [(2.0, False), (None, True), (2.0, True)])
def test_transformers_is_left_out_if_requests_arrive_one_by_one_or_it_only_judges(
    rate: float | None, only_judges: bool
) -> None:
    assert list(systems(replace(comparison(rate=rate), only_judges=only_judges))) == [ENGINE, ORCA]
    assert list(systems(comparison())) == [STATIC, CONTINUOUS, ENGINE, ORCA]


def test_memory_is_the_most_of_all_rounds_per_process_and_for_ranks_beside_what_they_hold() -> None:
    ours = result_of(ORCA, 100, 110)
    ours.memory = [
        [
            ProcessPeak("gateway", 90 * MIB, 50 * MIB),
            ProcessPeak("rank", 300 * MIB, 130 * MIB),
            ProcessPeak("rank", 200 * MIB, 120 * MIB),
        ],
        [
            ProcessPeak("gateway", 80 * MIB, 60 * MIB),
            ProcessPeak("rank", 250 * MIB, 140 * MIB),
            ProcessPeak("rank", 220 * MIB, 100 * MIB),
        ],
    ]
    rank_memory = RankMemory(weight_bytes=150 * MIB, kv_bytes_per_slot=MIB, slots=50)
    ours.rank_memory = [replace(rank_memory, slots=60), rank_memory]
    table = lines(comparison(), [ours])
    assert [row.split()[-2:] for row in table[3:6]] == [["90", "60"], ["300", "140"], ["220", "120"]]
    assert table[-1] == (
        "ranks of orca over HTTP: 2.60 x (anonymous 1.30 x) of the memory that they need, "
        "150 MiB of weights and 50 MiB of KV in use"
    )


def test_the_json_has_the_settings_of_the_figures() -> None:
    ours = result_of(ORCA, 100)
    ours.memory, ours.rank_memory = (
        [[ProcessPeak("rank", 5, 4)]],
        [RankMemory(weight_bytes=3, kv_bytes_per_slot=2, slots=1)],
    )
    content = to_json(comparison(rate=2.0), [result_of(STATIC, 50), result_of(CONTINUOUS, 80), ours])
    assert (content["generated_tokens"], content["prompt_tokens"], content["orca_up"]) == (
        8,
        "U(1,9)",
        ["--stages", "1"],
    )
    assert (content["model"], content["rate_per_s"]) == ("some-model", 2.0)
    assert [system["orca_is_times_as_fast"] for system in content["systems"]] == [2.0, 1.25, 1.0]
    assert content["systems"][-1]["memory"] == [[{"name": "rank", "whole_bytes": 5, "anonymous_bytes": 4}]]
    assert content["systems"][-1]["ranks_hold"] == [{"weight_bytes": 3, "kv_bytes_per_slot": 2, "slots": 1}]


def test_figures_name_system_and_precision_and_keep_all_rounds() -> None:
    theirs, ours = result_of(OPENVINO_DEFAULT, 90, 100, 250), result_of(ENGINE, 280, 300, 400)
    ours.shares_of_limit += [0.7, 0.8, 0.9]
    speed, other, share = figures(comparison(), [theirs, ours], {"load": "all at once", "lengths": "small"})
    assert (speed.value, speed.spread, speed.runs, speed.unit) == (100, (90, 250), 3, "tokens/s")
    assert speed.settings == {
        "system": "OpenVINO GenAI",
        "precision": "reduced",
        "model": "some-model",
        "batch": 2,
        "load": "all at once",
        "lengths": "small",
    }
    assert (other.what, other.value) == ("Generated tokens per second", 300)
    assert (share.what, share.value, share.unit) == ("Share of the speed of its matrix products", 80, "%")


def test_figures_of_requests_one_by_one_are_latencies() -> None:
    slow, fast = answer([0.1, 0.1], [0.4, 0.2]), answer([0.05, 0.05], [0.1, 0.05])
    found = figures(comparison(rate=2.0), [timed(ORCA, slow, fast, fast)], {"load": "2 requests/s"})
    assert {figure.what: (figure.value, figure.spread) for figure in found} == {
        "Time to first token, median": (50, (50, 100)),
        "Time to first token, p99": (50, (50, 100)),
        "Time per token, median": (50, (50, 200)),
        "Time per token, p99": (50, (50, 200)),
    }


def test_every_system_that_can_take_part_has_a_name_for_figures() -> None:
    whole = replace(comparison(), openvino=Path("python"), vllm=Path("python"))
    seq2seq = [
        replace(comparison(rate=rate), ctranslate2=Path("python"), is_encoder_decoder=True) for rate in (None, 2.0)
    ]
    assert {name for each in (whole, *seq2seq) for name in systems(each)} == set(SYSTEMS)
