"""Forbidden tokens and sequences: after any output the same tokens are left as with transformers' processors."""

import random

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, PrefixConstrainedLogitsProcessor

from orca.core.domain.request import SamplingParams
from orca.worker.masks.request_mask import ModelMasks, RequestMask
from support.worker.masks import unread

VOCAB, EOS = 70, 1


def allowed(mask: RequestMask) -> set[int]:
    mask.update()
    assert mask.failure is None
    return set(np.flatnonzero(np.unpackbits(mask.mask.view(np.uint8), bitorder="little")).tolist())


def masked(output: tuple[int, ...] = (), **params: object) -> RequestMask:
    return RequestMask(SamplingParams(**params), output, ModelMasks(VOCAB, (EOS,), (), unread))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_sequences_forbid_what_transformers_forbids_token_by_token_and_from_a_log(seed: int) -> None:
    chance = random.Random(seed)
    few = chance.sample(range(2, VOCAB), 3)  # of which most outputs are, so that sequences often match
    sequences = tuple({tuple(chance.choices(few, k=chance.randint(2, 4))) for _ in range(6)})
    alone = chance.randrange(2, VOCAB)
    theirs = NoBadWordsLogitsProcessor([[alone], *map(list, sequences)], eos_token_id=EOS)
    grown = masked(forbidden_token_ids=(alone,), forbidden_sequences=sequences)
    output: list[int] = []
    for _ in range(60):
        found = allowed(grown)
        # Transformers adds minus infinity once for each word that matches.
        scores = theirs(torch.tensor([[EOS, *output]]), torch.zeros(1, VOCAB))[0]
        assert found == set(torch.nonzero(scores == 0).flatten().tolist())
        # A rank that takes the request up from its log goes on with the same mask.
        again = masked(tuple(output), forbidden_token_ids=(alone,), forbidden_sequences=sequences)
        assert allowed(again) == found
        output.append(chance.choice(few))
        grown.take(output[-1])


@pytest.mark.parametrize("seed", range(5))
def test_allowed_tokens_are_those_that_transformers_leaves(seed: int) -> None:
    listed = random.Random(seed).sample(range(VOCAB), 1 + 16 * seed)
    theirs = PrefixConstrainedLogitsProcessor(lambda _batch, _tokens: listed, num_beams=1)
    scores = theirs(torch.tensor([[EOS]]), torch.zeros(1, VOCAB))[0]
    assert allowed(masked(allowed_token_ids=tuple(listed))) == set(torch.nonzero(scores == 0).flatten().tolist())


def test_the_prompt_is_no_part_of_a_sequence_and_overlaps_count() -> None:
    # By hand: 5 6 7 and 7 7.
    one = masked(forbidden_sequences=((5, 6, 7), (7, 7)))
    left = []
    for token in (6, 5, 6, 5, 6, 8, 7):
        left.append(set(range(VOCAB)) - allowed(one))
        one.take(token)
    left.append(set(range(VOCAB)) - allowed(one))
    assert left == [set(), set(), set(), {7}, set(), {7}, set(), {7}]
