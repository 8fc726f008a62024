"""The comparison with an encoder-decoder model: models, orders of batches, tokens, and what it shows."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from orca.bench.main import main as bench
from orca.bench.peers import engine_peer
from orca.bench.peers.arrivals import Arrivals
from orca.bench.peers.compare import check_kind, systems
from orca.bench.peers.comparison import PeerComparison
from orca.bench.peers.figures import SYSTEMS, figures
from orca.bench.peers.model import make_model
from orca.bench.peers.results import (
    CTRANSLATE2_BY_SOURCE,
    CTRANSLATE2_TWO,
    CTRANSLATE2_UP_TO,
    ENGINE,
    ORCA,
    STATIC_BY_ANSWER,
    STATIC_BY_ARRIVAL,
    STATIC_BY_SOURCE,
    PeerResult,
    PeerRound,
)
from orca.bench.peers.seq2seq import table, transformers_peer
from orca.bench.peers.seq2seq.ctranslate2_peer import CTranslate2, translate_all, translate_waiting
from orca.bench.peers.seq2seq.orders import ARRIVAL, BY_ANSWER, BY_SOURCE, batches
from orca.bench.peers.seq2seq.shapes import END, BartShape, T5Shape, bart_weights, t5_weights
from orca.bench.peers.workload import PeerAnswer, PeerWorkload
from orca.core.domain.errors import SettingError
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import TraceSpec, generate
from support.bench.peer_runs import check_judge, some_comparison

TINY_T5 = T5Shape(layers=2, hidden=48, heads=3, head_dim=16, intermediate=80, vocab=300)
TINY_BART = BartShape(layers=2, hidden=48, heads=3, intermediate=80, vocab=300, positions=128)


@pytest.fixture(scope="module", params=[TINY_T5, TINY_BART], ids=["t5", "bart"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def workload(model: Path) -> PeerWorkload:
    trace = generate(TraceSpec(requests=7, prompt_tokens=Range(3, 20), new_tokens=Range(1, 12), seed=5))
    return PeerWorkload.of(trace, model, TINY_T5.vocab, batch_size=3, threads=1)


def peer(mode: str, workload: PeerWorkload, folder: Path, *more: Path) -> Path:
    """Run transformers as the comparison does, but in this process."""
    workload.save(folder / "workload.json")
    transformers_peer.main([mode, str(folder / "workload.json"), str(folder / "answer.json"), *map(str, more)])
    return folder / "answer.json"


def engine(kind: str, workload: PeerWorkload, folder: Path) -> PeerAnswer:
    workload.save(folder / "workload.json")
    engine_peer.main([kind, str(folder / "workload.json"), str(folder / "engine.json")])
    return PeerAnswer.load(folder / "engine.json")


def test_every_order_of_batches_and_the_engine_give_the_same_tokens(workload: PeerWorkload, tmp_path: Path) -> None:
    answers = [PeerAnswer.load(peer(order, workload, tmp_path)) for order in (ARRIVAL, BY_SOURCE, BY_ANSWER)]
    first = answers[0].tokens
    assert [len(tokens) for tokens in first] == workload.new_tokens
    assert [answer.tokens for answer in answers[1:]] == [first, first]
    at_once = engine("float32", workload, tmp_path)
    assert (at_once.tokens, at_once.limit_seconds) == (first, None)
    paced = engine("float32", replace(workload, arrivals_s=[0.0, 0.0, 0.001, 0.002, 0.003, 0.004, 0.3]), tmp_path)
    assert paced.tokens == first


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_the_engine_gives_as_many_tokens_in_less_precision(kind: str, workload: PeerWorkload, tmp_path: Path) -> None:
    assert [len(tokens) for tokens in engine(kind, workload, tmp_path).tokens] == workload.new_tokens


def test_the_reference_finds_its_own_tokens_right_and_a_changed_one_wrong(
    workload: PeerWorkload, tmp_path: Path
) -> None:
    answer = PeerAnswer.load(peer(ARRIVAL, workload, tmp_path))
    judge = partial(peer, "judge", workload, tmp_path)
    check_judge(answer, judge, workload.new_tokens, vocab=TINY_T5.vocab, folder=tmp_path)


def test_the_output_of_a_made_model_depends_on_every_token_of_its_source(
    workload: PeerWorkload, tmp_path: Path
) -> None:
    source = workload.prompts[1]  # with a very short one, a model of two layers may repeat a token
    changed = [[*source[:at], (source[at] + 1) % TINY_T5.vocab, *source[at + 1 :]] for at in range(len(source))]
    sources = [source, *changed]
    wanted = replace(workload, prompts=sources, new_tokens=[32] * len(sources), batch_size=32)
    first, *others = PeerAnswer.load(peer(ARRIVAL, wanted, tmp_path)).tokens
    assert len(set(first)) > 3
    assert first not in others
    assert not any(END in answer for answer in [first, *others])


def test_the_models_have_about_as_many_parameters_as_their_names_say() -> None:
    generator = torch.Generator().manual_seed(0)
    for weights in (t5_weights(T5Shape(), generator), bart_weights(BartShape(), generator)):
        assert sum(weight.numel() for weight in weights.values()) == pytest.approx(60e6, rel=0.02)


def test_batches_by_length_begin_with_the_longest_and_hold_each_request_once() -> None:
    workload = PeerWorkload(
        model="", prompts=[[1] * length for length in (2, 9, 5, 7)], new_tokens=[8, 1, 6, 3], batch_size=2, threads=1
    )
    assert batches(workload, ARRIVAL) == [[0, 1], [2, 3]]
    assert batches(workload, BY_SOURCE) == [[1, 3], [2, 0]]
    assert batches(workload, BY_ANSWER) == [[0, 2], [3, 1]]


class FakeCTranslate2(CTranslate2):
    """Answers each request with its first token, as often as wanted, and records the batches."""

    def __init__(self, batches_at_once: int = 1) -> None:
        self.batches_at_once = batches_at_once
        self.batches: list[list[int]] = []

    def source(self, prompt: list[int]) -> list[str]:
        return [str(token) for token in prompt]

    def translate(
        self, sources: list[list[str]], counts: list[int], numbers: list[int], arrivals: Arrivals
    ) -> list[list[int]]:
        self.batches.append(numbers)
        for _ in range(max(counts)):
            arrivals.record_tokens(numbers)
        return [[int(source[0])] * count for source, count in zip(sources, counts, strict=True)]


def test_answers_of_sorted_batches_return_to_their_requests() -> None:
    workload = PeerWorkload(model="", prompts=[[4, 1], [5], [6, 1, 1]], new_tokens=[1, 2, 3], batch_size=2, threads=1)
    translator = FakeCTranslate2()
    answer = translate_all(translator, workload, BY_SOURCE)
    assert translator.batches == [[2, 0], [1]]
    assert answer.tokens == [[4], [5, 5], [6, 6, 6]]


@pytest.mark.parametrize("arrivals_s", [None, [0.0] * 9])
def test_two_batches_at_once_answer_each_request_once(arrivals_s: list[float] | None) -> None:
    prompts = [[4 + number] for number in range(9)]
    workload = PeerWorkload(
        model="", prompts=prompts, new_tokens=[2] * 9, batch_size=2, threads=2, arrivals_s=arrivals_s
    )
    translator = FakeCTranslate2(batches_at_once=2)
    answer = (
        translate_all(translator, workload, BY_SOURCE)
        if arrivals_s is None
        else translate_waiting(translator, workload, 2)
    )
    assert sorted(number for batch in translator.batches for number in batch) == list(range(9))
    assert answer.tokens == [2 * prompt for prompt in prompts]


def test_a_batch_has_all_requests_that_wait_up_to_the_limit() -> None:
    prompts, counts, arrivals_s = [[4], [5], [6], [7]], [1, 2, 1, 1], [0.0, 0.0, 0.0, 0.05]
    workload = PeerWorkload(
        model="", prompts=prompts, new_tokens=counts, batch_size=2, threads=1, arrivals_s=arrivals_s
    )
    translator = FakeCTranslate2()
    answer = translate_waiting(translator, workload, 2)
    assert translator.batches == [[0, 1], [2], [3]]
    assert answer.tokens == [[4], [5, 5], [6], [7]]
    assert answer.seconds >= 0.05


def comparison(rate: float | None = None, *, only_judges: bool = False) -> PeerComparison:
    return some_comparison(
        rate, requests=2, ctranslate2=Path("python"), is_encoder_decoder=True, only_judges=only_judges
    )


def test_systems_depend_on_how_the_requests_arrive() -> None:
    at_once, paced = list(systems(comparison())), list(systems(comparison(rate=2.0)))
    assert at_once[:4] == [STATIC_BY_ARRIVAL, STATIC_BY_SOURCE, STATIC_BY_ANSWER, CTRANSLATE2_BY_SOURCE]
    assert paced[:4] == [*CTRANSLATE2_UP_TO.values(), CTRANSLATE2_TWO]
    assert STATIC_BY_SOURCE not in systems(comparison(only_judges=True))
    assert at_once[-2:] == paced[-2:] == [ENGINE, ORCA]
    assert set(at_once) | set(paced) <= set(SYSTEMS)
    assert list(systems(replace(comparison(rate=2.0), ctranslate2=None))) == [ENGINE, ORCA]


def result(name: str, seconds: float) -> PeerResult:
    """Return the result of a system whose two answers are ready after this time."""
    made = PeerResult(name)
    answer = PeerAnswer(seconds=seconds, tokens=[[1, 2], [3, 4]], first_s=[seconds] * 2, last_s=[seconds] * 2)
    made.add(PeerRound(answer=answer, memory=[]), [2, 2])
    return made


def test_the_table_compares_the_engine_with_ctranslate2_and_names_the_next_rate() -> None:
    results = [result(CTRANSLATE2_BY_SOURCE, 0.5), result(ENGINE, 0.25)]
    assert table.lines(comparison(), results) == [
        "orca engine is 2.00 x as fast as ctranslate2 by source",
        "70% of the capacity of ctranslate2 by source is --rate 2.8",
    ]
    faster = [*results, result(CTRANSLATE2_TWO, 0.4)]
    assert table.lines(comparison(), faster)[-1] == "70% of the capacity of ctranslate2 two batches is --rate 3.5"
    paced = [result(CTRANSLATE2_UP_TO[8], 0.5), result(ENGINE, 0.25)]
    assert table.lines(comparison(rate=2.0), paced) == [
        "orca engine takes 0.50 x of ctranslate2 up to 8: whole answer, median"
    ]


def test_figures_of_requests_one_by_one_are_times_of_whole_answers() -> None:
    found = figures(comparison(rate=2.0), [result(ENGINE, 0.25)], {"load": "2 requests/s"})
    assert {figure.what: figure.value for figure in found} == {
        "Time to the whole answer, median": 250,
        "Time to the whole answer, p99": 250,
    }


@pytest.mark.parametrize("peer_name", ["openvino", "vllm", "ctranslate2"])
def test_a_peer_for_the_other_kind_of_model_is_refused(peer_name: str, tmp_path: Path) -> None:
    pythons: dict[str, Path | None] = {"openvino": None, "vllm": None, "ctranslate2": None, peer_name: tmp_path}
    with pytest.raises(SettingError, match=f"--{peer_name} is for "):
        check_kind(**pythons, is_encoder_decoder=peer_name != "ctranslate2")


def test_an_environment_without_ctranslate2_is_refused_before_anything_runs() -> None:
    with pytest.raises(
        SettingError, match=r"--ctranslate2: .* is not a Python with the packages of .*ctranslate2\.txt"
    ):
        bench(["peers", "--ctranslate2", "/bin/true", "--requests", "1"])
