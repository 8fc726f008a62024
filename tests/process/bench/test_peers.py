"""The comparison with transformers: the model it makes, how tokens are judged, and what it shows."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from orca.bench.main import PEER_SHAPES
from orca.bench.main import main as bench
from orca.bench.peers import compare, engine_peer, transformers_peer
from orca.bench.peers.compare import up_options
from orca.bench.peers.judgement import judge
from orca.bench.peers.model import SHAPES, GPT2Shape, LlamaShape, Shape, make_model
from orca.bench.peers.workload import PeerAnswer, PeerWorkload
from orca.core.domain.errors import SettingError
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import TraceSpec, generate
from support.bench.peer_runs import check_judge

TINY = LlamaShape(layers=2, hidden=48, heads=4, kv_heads=2, intermediate=80, vocab=300, positions=128)
TINY_GPT2 = GPT2Shape(layers=2, hidden=48, heads=4, vocab=300, positions=128)


@pytest.fixture(scope="module", params=[TINY, TINY_GPT2], ids=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def workload(model: Path) -> PeerWorkload:
    trace = generate(TraceSpec(requests=7, prompt_tokens=Range(3, 20), new_tokens=Range(1, 12), seed=5))
    return PeerWorkload(
        model=str(model),
        prompts=[trace.prompt(index, TINY.vocab) for index in range(7)],
        new_tokens=[request.new_tokens for request in trace.requests],
        batch_size=3,
        threads=1,
    )


def peer(mode: str, workload: PeerWorkload, folder: Path, *more: Path) -> Path:
    """Run transformers as the comparison does, but in this process."""
    workload.save(folder / "workload.json")
    transformers_peer.main([mode, str(folder / "workload.json"), str(folder / "answer.json"), *map(str, more)])
    return folder / "answer.json"


@pytest.mark.sampled(1)
def test_static_and_continuous_batching_give_every_request_the_same_tokens(
    workload: PeerWorkload, tmp_path: Path
) -> None:
    static, continuous = (PeerAnswer.load(peer(mode, workload, tmp_path)) for mode in ("static", "continuous"))
    assert [len(tokens) for tokens in static.tokens] == workload.new_tokens
    assert continuous.tokens == static.tokens
    assert static.seconds > 0


@pytest.mark.sampled(1)
def test_the_engine_alone_gives_every_request_the_same_tokens(workload: PeerWorkload, tmp_path: Path) -> None:
    static = PeerAnswer.load(peer("static", workload, tmp_path))
    engine_peer.main(["float32", str(tmp_path / "workload.json"), str(tmp_path / "engine.json")])
    engine = PeerAnswer.load(tmp_path / "engine.json")
    assert engine.tokens == static.tokens
    assert engine.limit_seconds is not None
    assert 0 < engine.limit_seconds < engine.seconds


def test_the_engine_alone_takes_requests_when_they_arrive(workload: PeerWorkload, tmp_path: Path) -> None:
    static = PeerAnswer.load(peer("static", workload, tmp_path))
    # The last one comes when the others have long ended.
    replace(workload, arrivals_s=[0.0, 0.0, 0.001, 0.002, 0.003, 0.004, 1.5]).save(tmp_path / "workload.json")
    engine_peer.main(["float32", str(tmp_path / "workload.json"), str(tmp_path / "engine.json")])
    engine = PeerAnswer.load(tmp_path / "engine.json")
    assert engine.tokens == static.tokens
    assert engine.limit_seconds is None
    assert engine.first_s is not None
    assert engine.last_s is not None
    assert engine.seconds >= 1.5 + engine.last_s[-1]
    assert all(0 < first <= last for first, last in zip(engine.first_s, engine.last_s, strict=True))


def test_the_reference_finds_its_own_tokens_right_and_a_changed_one_wrong(
    workload: PeerWorkload, tmp_path: Path
) -> None:
    answer = PeerAnswer.load(peer("static", workload, tmp_path))
    judge = partial(peer, "judge", workload, tmp_path)
    check_judge(answer, judge, workload.new_tokens, vocab=TINY.vocab, folder=tmp_path)


def test_the_output_of_the_made_model_depends_on_every_token_of_its_prompt(
    workload: PeerWorkload, tmp_path: Path
) -> None:
    prompt = workload.prompts[0]
    changed = [[*prompt[:at], (prompt[at] + 1) % TINY.vocab, *prompt[at + 1 :]] for at in range(len(prompt))]
    prompts = [prompt, *changed]
    wanted = PeerWorkload(
        model=workload.model, prompts=prompts, new_tokens=[16] * len(prompts), batch_size=32, threads=1
    )
    first, *others = PeerAnswer.load(peer("static", wanted, tmp_path)).tokens
    assert len(set(first)) > 3
    assert first not in others


LLAMA_LAYER = 48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 80 + 2 * 48
GPT2_LAYER = 48 * 48 * (3 + 1 + 4 + 4) + 48 * (3 + 1 + 4 + 1) + 4 * 48


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (TINY, 2 * LLAMA_LAYER + 2 * 300 * 48 + 48),
        (TINY_GPT2, 2 * GPT2_LAYER + (300 + 128) * 48 + 2 * 48),
    ],
    ids=["llama", "gpt2"],
)
def test_a_made_model_has_the_parameters_of_its_shape(tmp_path: Path, shape: Shape, parameters: int) -> None:
    assert make_model(tmp_path, shape) == parameters
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 300


def test_the_command_line_offers_the_shapes_that_can_be_made() -> None:
    assert tuple(SHAPES) == PEER_SHAPES


@pytest.mark.parametrize(("name", "stored"), [("tiny", torch.float32), ("tiny-bf16", torch.bfloat16)])
def test_a_made_model_is_stored_in_what_its_name_says(
    name: str, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "SHAPES", {name: TINY})
    made = compare.make_random_model(name, tmp_path, lambda _said: None)
    assert {each.dtype for each in load_file(made / "model.safetensors").values()} == {stored}


def test_a_model_of_the_caller_and_one_to_be_made_exclude_each_other() -> None:
    with pytest.raises(SettingError, match="--shape"):
        bench(["peers", "--model", "x", "--shape", "gpt2-8x384"])


def test_the_tokenizer_of_a_made_model_reads_any_text_and_writes_any_token(model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY.vocab
    text = "Grüße, 世界"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode([TINY.vocab - 1]).strip() == "w43"


LOGITS = torch.tensor([[0.0, 1.0, 0.99995], [3.0, 1.0, 2.0]])


@pytest.mark.parametrize(
    ("answer", "excused", "wrong"),
    [
        ([1, 0], 0, 0),  # the reference's own
        ([2, 0], 1, 0),  # behind by 0.00005
        ([0, 0], 0, 1),  # behind by 1, though the two best are near
        ([1, 2], 0, 1),
    ],
)
def test_a_token_is_excused_only_when_its_own_logit_is_within_the_margin(
    answer: list[int], excused: int, wrong: int
) -> None:
    verdict = judge([[5]], [2], [answer], lambda *_: LOGITS)
    assert (verdict.tokens, verdict.excused, verdict.wrong) == (2, excused, wrong)
    assert verdict.is_right == (wrong == 0)


def test_an_answer_of_the_wrong_length_is_wrong() -> None:
    verdict = judge([[5], [6]], [2, 1], [[1, 0], []], lambda _, tokens: LOGITS[: len(tokens)])
    assert (verdict.wrong, verdict.wrong_counts, verdict.is_right) == (0, 1, False)


def test_the_warm_up_is_short(workload: PeerWorkload) -> None:
    head = replace(workload, new_tokens=[1, 12, 3, 9, 9, 9, 9], arrivals_s=[0.5] * 7).head(3)
    assert (len(head.prompts), head.new_tokens, head.arrivals_s) == (3, [1, 4, 3], None)


@pytest.mark.parametrize("program", [sys.executable, shutil.which("true")])
@pytest.mark.parametrize("peer", ["openvino", "vllm"])
def test_an_environment_without_the_peer_is_refused_before_anything_runs(peer: str, program: str) -> None:
    with pytest.raises(SettingError, match=rf"--{peer}: .* is not a Python with the packages of .*{peer}\.txt"):
        bench(["peers", f"--{peer}", program, "--requests", "1"])


def test_options_of_the_caller_replace_those_of_the_comparison() -> None:
    options = up_options(16, 2, ["--stages", "2", "--prefetch", "0"])
    assert options.count("--stages") == 1
    assert options[-4:] == ["--stages", "2", "--prefetch", "0"]
    assert options[: options.index("--threads") + 2][-2:] == ["--threads", "2"]
