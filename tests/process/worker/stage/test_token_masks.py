"""Token masks of requests: what a grammar and the other limits leave, when they fail, and what others notice of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Refused, Sampled
from orca.core.grammars.matching import NO_FORCING, GrammarVocabulary
from orca.worker.masks.request_mask import ModelMasks, RequestMask, mask_of
from orca.worker.masks.token_masks import TokenMasks, vocabulary_reader
from orca.worker.stage.sampling import HostSampler, SamplingRow
from orca.worker.stage.step_runner import StepOutput
from support.worker.masks import a_new_request, no_masks, unread

VOCAB, EOS = 199, 1
BYTES = {chr(byte): place for place, byte in enumerate(range(32, 127), start=2)}
"""The tokens of a tiny model: one per byte, printable ones first."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    folder = tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)
    return vocabulary_reader(folder, VOCAB, (EOS,))()


def request_mask(
    vocabulary: GrammarVocabulary, grammar: str | None = None, *, never: Sequence[int] = (), **params: Any
) -> RequestMask:
    sampling = SamplingParams(grammar=None if grammar is None else f"{grammar}\n{NO_FORCING}", **params)
    return RequestMask(sampling, (), ModelMasks(VOCAB, (EOS,), never, lambda: vocabulary))


def allowed(mask: RequestMask, *tokens: int) -> set[int]:
    for token in tokens:
        mask.take(token)
    mask.update()
    bits = np.unpackbits(mask.mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def ids(text: str) -> list[int]:
    return [BYTES[character] for character in text]


def test_mask_of_has_the_bits_of_its_tokens() -> None:
    assert mask_of([0, 31, 32, 70], 71).tolist() == [1 | 1 << 31, 1, 1 << 6]
    assert mask_of([], 71).tolist() == [0, 0, 0]
    assert mask_of(range(33), 33).tolist() == [2**32 - 1, 1]


def test_limits_are_intersected_with_the_grammar(vocabulary: GrammarVocabulary) -> None:
    one = request_mask(
        vocabulary, "start: /[a-f]+/", allowed_token_ids=(*ids("abcxyz"), EOS), forbidden_token_ids=tuple(ids("b"))
    )
    assert allowed(one) == set(ids("ac"))
    assert allowed(one, *ids("a")) == {EOS, *ids("ac")}


def test_without_a_grammar_the_limits_alone_count(vocabulary: GrammarVocabulary) -> None:
    one = request_mask(vocabulary, allowed_token_ids=(5, 6, EOS), forbidden_token_ids=(6,), min_tokens=2)
    assert allowed(one) == {5}
    assert allowed(one, 5) == {5}
    assert allowed(one, 5) == {5, EOS}
    only_forbidden = request_mask(vocabulary, forbidden_token_ids=(6,), never=(7,))
    assert allowed(only_forbidden) == {*range(VOCAB)} - {6, 7}


def test_min_tokens_forbids_the_end_of_a_text_that_may_go_on(vocabulary: GrammarVocabulary) -> None:
    one = request_mask(vocabulary, "start: /a+/", min_tokens=2, stop_token_ids=(9,))
    assert allowed(one) == set(ids("a"))
    assert allowed(one, *ids("a")) == set(ids("a"))
    assert allowed(one, *ids("a")) == {EOS, *ids("a")}


@pytest.mark.parametrize("grammar", ['start: "a"', 'start: "a" | "aa"'], ids=["complete", "whole"])
def test_a_complete_text_ends_whatever_the_other_limits_say(vocabulary: GrammarVocabulary, grammar: str) -> None:
    one = request_mask(
        vocabulary, grammar, min_tokens=9, allowed_token_ids=tuple(ids("ab")), forbidden_token_ids=(EOS,)
    )
    assert allowed(one) == set(ids("a"))
    rest = allowed(one, *ids("a"))
    if rest == set(ids("a")):
        rest = allowed(one, *ids("a"))
    assert rest == {EOS}
    assert one.failure is None


def test_limits_that_leave_no_token_are_a_failure(vocabulary: GrammarVocabulary) -> None:
    one = request_mask(vocabulary, 'start: "ab"', forbidden_token_ids=tuple(ids("b")))
    assert allowed(one) == set(ids("a"))
    allowed(one, *ids("a"))
    assert one.failure == "the grammar and the other limits on tokens leave no token for token 1 of the output"


@pytest.mark.parametrize(
    ("grammar", "tokens", "words"),
    [("start: (", "", "cannot|Expected|failed"), ('start: "ab"', "b", "failed at token 1")],
)
def test_a_matcher_that_cannot_go_on_is_a_failure_for_good(
    vocabulary: GrammarVocabulary, grammar: str, tokens: str, words: str
) -> None:
    one = request_mask(vocabulary, grammar)
    allowed(one, *ids(tokens))
    assert one.failure is not None
    assert any(word in one.failure for word in words.split("|"))
    first = one.failure
    allowed(one, *ids("a"))
    assert one.failure == first


def test_a_model_without_a_tokenizer_refuses_the_request(tmp_path: Path) -> None:
    shared = ModelMasks(VOCAB, (EOS,), (), vocabulary_reader(tmp_path, VOCAB, (EOS,)))
    one = RequestMask(SamplingParams(grammar='start: "a"'), (), shared)
    one.update()
    assert one.failure is not None
    assert "cannot be used" in one.failure


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_with_and_without_masks_share_a_step_and_one_failure_is_of_its_row_alone(
    vocabulary: GrammarVocabulary, threads: int
) -> None:
    masks = TokenMasks(ModelMasks(VOCAB, (EOS,), (), lambda: vocabulary), threads=threads)
    sampler = HostSampler((EOS,), (), masks)
    greedy: dict[str, Any] = {"temperature": 0.0}
    params = [
        SamplingParams(**greedy),
        SamplingParams(grammar=f"start: /[a-f]+/\n{NO_FORCING}", **greedy),
        SamplingParams(grammar="start: (", **greedy),
        SamplingParams(allowed_token_ids=(8, 9), logprobs=1, **greedy),
    ]
    for line, each in enumerate(params):
        sampler.start(line, a_new_request(line, each))
    logits = torch.zeros(4, VOCAB)
    logits[:, 150] = 5.0
    logits[:, 9] = 1.0
    logits[1, BYTES["c"]] = 0.5
    rows = [SamplingRow(line, line, 0, each) for line, each in enumerate(params)]
    drawn = sampler.sample(rows, StepOutput(logits)).read()
    assert [type(each) for each in drawn] == [Sampled, Sampled, Refused, Sampled]
    tokens = [each.token.id for each in drawn if isinstance(each, Sampled)]
    assert tokens == [150, BYTES["c"], 9]
    last = drawn[3]
    assert isinstance(last, Sampled)
    assert last.token.logprob is not None
    assert last.token.logprob.top[0][0] == 150, "log probabilities are those of the raw logits"


def test_a_line_that_starts_again_takes_its_log(vocabulary: GrammarVocabulary) -> None:
    """Another request on the line has its own mask, and one without a mask has none."""
    masks = TokenMasks(ModelMasks(VOCAB, (EOS,), (), lambda: vocabulary), threads=1)
    params = SamplingParams(grammar=f'start: "abc"\n{NO_FORCING}')
    masks.start(0, a_new_request(0, params, output=ids("ab")))
    assert masks.of_lines([0])[0].mask.tolist() == mask_of(ids("c"), VOCAB).tolist()
    masks.start(0, a_new_request(1, params))
    assert masks.of_lines([0])[0].mask.tolist() == mask_of(ids("a"), VOCAB).tolist()
    masks.start(0, a_new_request(2, SamplingParams()))
    assert not masks.of_lines([0])


def test_requests_without_masks_read_no_tokenizer_and_start_no_thread() -> None:
    masks = TokenMasks(ModelMasks(VOCAB, (EOS,), (), unread), threads=1)
    masks.start(0, a_new_request(0, SamplingParams()))
    assert not masks.of_lines([0])
    assert "_threads" not in vars(masks)
    assert not no_masks(vocab_size=4).of_lines([0])
