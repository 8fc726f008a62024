"""Whole lives of requests as GPUs serve them: recorded steps, and tokens that are drawn, counted and fed on the device.

Without a GPU kernels run in Triton's interpreter, and a recording calls again what was recorded.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.request import SamplingParams
from orca.core.grammars.matching import NO_FORCING
from orca.kernels.device import use_kernels
from orca.kernels.gpu.kernels import TritonKernels
from orca.kernels.plain import PlainKernels
from orca.worker.stage.sampling import DeviceSampler
from support.worker.stage_driver import GREEDY, Ask, Chain, serve

VOCAB = 199
PROMPTS = ([5, 80, 17, 44, 102], [63], [31, 120, 7, 7, 9, 11, 150, 2, 3])
SAMPLED = (
    SamplingParams(seed=1, temperature=0.9),
    SamplingParams(seed=2, temperature=0.7, top_p=0.8, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(seed=3, top_k=9, repetition_penalty=1.4, min_tokens=4, logit_bias=((1, 20.0), (30, -5.0))),
)

MASKED = (
    SamplingParams(seed=1, temperature=0.9, grammar=f"start: /[a-f]{{3,20}}/\n{NO_FORCING}", min_tokens=2),
    GREEDY,
    SamplingParams(seed=3, allowed_token_ids=tuple(range(40, 60)), repetition_penalty=1.4, logprobs=1),
)
"""Two of three requests have a mask: a step with one of these draws outside its recording."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), seed=1, num_hidden_layers=2)


@pytest.fixture
def gpu() -> Iterator[None]:
    with use_kernels("cuda" if torch.cuda.is_available() else "cpu", TritonKernels()):
        yield


@pytest.fixture
def plain() -> Iterator[None]:
    with use_kernels("cuda" if torch.cuda.is_available() else "cpu", PlainKernels()):
        yield


PREFIXES = ((2,), (2, 41, 7), (2, 90))
"""Beginnings of targets, shorter and longer than the prompts, which are the sources."""


def asks(
    params: tuple[SamplingParams, ...], new_tokens: int = 9, prefixes: tuple[tuple[int, ...], ...] = ((), (), ())
) -> list[Ask]:
    """They join one by one."""
    each_one = zip(PROMPTS, params, prefixes, strict=True)
    return [
        Ask(prompt, new_tokens, each, arrival=2 * place, decoder_prefix=prefix)
        for place, (prompt, each, prefix) in enumerate(each_one)
    ]


def served(folder: Path, params: tuple[SamplingParams, ...], **options: object) -> list[Ask]:
    chunk = options.pop("chunk", None)
    chain = Chain(folder, packs=True, **options)  # type: ignore[arg-type]
    asked = asks(params)
    serve(chain, asked, chunk=chunk)  # type: ignore[arg-type]
    chain.close()
    return asked


@pytest.mark.sampled(1, others="prove")
@pytest.mark.parametrize("feeds_tokens", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("params", [(GREEDY,) * 3, SAMPLED, MASKED], ids=["greedy", "sampled", "masked"])
def test_tokens_are_those_of_plain_kernels_and_of_the_hosts_sampler(
    params: tuple[SamplingParams, ...], stages: int, feeds_tokens: bool, folder: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("plain")
    expected = [ask.output for ask in served(folder, params)]
    with use_kernels("cuda" if torch.cuda.is_available() else "cpu", TritonKernels()):
        found = served(folder, params, stages=stages, feeds_tokens=feeds_tokens, chunk=4)
    assert [ask.output for ask in found] == expected


@pytest.mark.usefixtures("gpu")
def test_most_steps_are_recorded_and_sampled_on_the_device(folder: Path) -> None:
    chain = Chain(folder, packs=True, feeds_tokens=True)
    [[stage]] = chain.stages
    assert isinstance(stage._sampler, DeviceSampler)
    serve(chain, asks(SAMPLED))
    assert stage._recorded is not None
    assert {size.tokens for size, _ in stage._recorded._recordings} == {1, 2, 4}
    assert all(draws for _, draws in stage._recorded._recordings)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("feeds_tokens", [False, True])
def test_masked_tokens_are_drawn_on_the_device_outside_the_recording(folder: Path, feeds_tokens: bool) -> None:
    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    for kernels in (PlainKernels(), TritonKernels()):
        with use_kernels(device, kernels):
            chain = Chain(folder, packs=True, feeds_tokens=feeds_tokens)
            asked = asks(MASKED)
            serve(chain, asked)
            found.append([ask.output for ask in asked])
    [[stage]] = chain.stages
    assert isinstance(stage._sampler, DeviceSampler)
    assert stage._recorded is not None
    assert not all(draws for _, draws in stage._recorded._recordings)
    assert found[0] == found[1]
    text = bytes(token - 2 + 32 for token in found[1][0] if token != 1)
    assert re.fullmatch(rb"[a-f]{3,20}", text), text


@pytest.mark.prove
@pytest.mark.usefixtures("gpu")
def test_log_probabilities_are_reported_even_if_the_device_samples(folder: Path) -> None:
    asking = tuple(replace(each, logprobs=2) for each in SAMPLED)
    found = served(folder, asking)
    with use_kernels("cuda" if torch.cuda.is_available() else "cpu", PlainKernels()):
        expected = served(folder, asking)
    for ask, other in zip(found, expected, strict=True):
        for one, wanted in zip(ask.sampled, other.sampled, strict=True):
            assert one.token.id == wanted.token.id
            assert one.token.logprob is not None
            assert wanted.token.logprob is not None
            assert one.token.logprob.logprob == pytest.approx(wanted.token.logprob.logprob, abs=1e-4)
            assert [token for token, _ in one.token.logprob.top] == [token for token, _ in wanted.token.logprob.top]


@pytest.mark.prove
@pytest.mark.usefixtures("gpu")
def test_a_request_continued_from_its_log_gets_the_same_tokens(folder: Path) -> None:
    whole = served(folder, SAMPLED)
    again = [Ask(ask.prompt, ask.max_new_tokens, ask.params, log=ask.output[:3]) for ask in whole]
    serve(Chain(folder, packs=True), again)
    assert [ask.output for ask in again] == [ask.output for ask in whole]


@pytest.mark.sampled(1, others="prove")
@pytest.mark.parametrize("family", ["t5_gated", "bart"])
def test_targets_are_recorded_and_sampled_on_the_device(family: str, tmp_path: Path) -> None:
    """A token's index counts from the beginning of the target, which has another length than the source."""
    layers = ("num_layers", "num_decoder_layers") if family == "t5_gated" else ("encoder_layers", "decoder_layers")
    folder = tiny_checkpoint(family, tmp_path, seed=1, **dict.fromkeys(layers, 1))
    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    for kernels in (PlainKernels(), TritonKernels()):
        with use_kernels(device, kernels):
            chain = Chain(folder, packs=True, feeds_tokens=True)
            asked = asks(SAMPLED, 4, PREFIXES)
            serve(chain, asked)
            found.append([ask.output for ask in asked])
    [[stage]] = chain.stages
    assert isinstance(stage._sampler, DeviceSampler)
    assert stage._recorded is not None
    assert stage._recorded._recordings
    assert found[0] == found[1]


@pytest.mark.prove
@pytest.mark.parametrize(("family", "rounded"), [("t5_gated", 1.5), ("bart", 0.25)])
def test_targets_in_bfloat16_on_three_stages_are_those_of_plain_kernels(
    family: str, rounded: float, tmp_path: Path
) -> None:
    """The encoder, the decoder's first layer and its last one are stages of their own.

    The two round differently, so a token may differ where the plain kernels hardly chose. Logits of this T5 are up to
    64, where the steps of bfloat16 are 1/4: its log probabilities may be apart by a few of them. Those of BART are
    small. Other tokens are 2 to 12 behind the best.
    """
    layers = ("num_layers", "num_decoder_layers") if family == "t5_gated" else ("encoder_layers", "decoder_layers")
    folder = tiny_checkpoint(family, tmp_path, seed=1, **dict(zip(layers, (1, 2), strict=True)))
    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    params = (replace(GREEDY, logprobs=5),) * 3
    for kernels in (PlainKernels(), TritonKernels()):
        with use_kernels(device, kernels):
            chain = Chain(folder, stages=3, packs=True, feeds_tokens=True, dtype="bfloat16")
            asked = asks(params, 6, PREFIXES)
            serve(chain, asked)
            chain.close()
            found.append([[one.token for one in ask.sampled] for ask in asked])
    assert [ranks[0].begins_targets for ranks in chain.stages] == [False, True, False]
    compared = 0
    for plain_tokens, tokens in zip(*found, strict=True):
        for wanted, token in zip(plain_tokens, tokens, strict=True):
            assert wanted.logprob is not None
            assert token.logprob is not None
            if token.id != wanted.id:
                assert wanted.logprob.logprob - dict(wanted.logprob.top)[token.id] < rounded
                break
            assert token.logprob.logprob == pytest.approx(wanted.logprob.logprob, abs=rounded)
            compared += 1
    assert compared >= 9
