"""The slots of requests with one and with two block tables, and the exact bounds over all splits of their tokens."""

from itertools import product

import pytest

from orca.core.domain.request import (
    Request,
    SamplingParams,
    reserved_slots,
    slots_needed,
    slots_of_any_split,
    tokens_of_any_split,
)
from orca.core.domain.step import Claim, NewRequest


def a_request(source: int, target: int) -> Request:
    """A request of an encoder-decoder model with so many tokens in each table."""
    return Request(
        parent="A",
        choice=0,
        revision="r1",
        prompt=(5,) * source,
        decoder_prefix=(0,),
        max_new_tokens=target - 1,
        sampling=SamplingParams(),
    )


def need_of_worst_split(tokens: int, block_tokens: int) -> int:
    """Return the slots of the most expensive request. Its target has a start token and room for one more."""
    return max(a_request(source, tokens - source).slots(block_tokens) for source in range(1, tokens - 1))


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 16])
def test_the_bound_on_slots_is_the_need_of_the_most_expensive_split(block_tokens: int) -> None:
    for tokens in range(3, 70):
        bound = slots_of_any_split(tokens, block_tokens)
        assert bound == need_of_worst_split(tokens, block_tokens)
        assert bound <= slots_needed(tokens, block_tokens) + block_tokens


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 16])
def test_the_bound_on_tokens_is_the_longest_length_that_fits_in_every_split(block_tokens: int) -> None:
    for slots in range(2 * block_tokens, 70):
        tokens = tokens_of_any_split(slots, block_tokens)
        assert tokens < 3 or need_of_worst_split(tokens, block_tokens) <= slots
        assert need_of_worst_split(tokens + 1, block_tokens) > slots
    assert tokens_of_any_split(block_tokens - 1, block_tokens) == 0


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
def test_request_and_message_reserve_the_same_slots(block_tokens: int) -> None:
    for source, target in product((1, 2, 16, 17), (2, 3, 16, 48)):
        request = a_request(source, target)
        new = NewRequest(
            handle=1,
            request_id=request.id,
            claim=Claim(1, "c"),
            tokens=request.prompt,
            prompt_length=source,
            max_total_tokens=request.max_total_tokens,
            sampling=request.sampling,
            decoder_prefix=request.decoder_prefix,
            max_new_tokens=request.max_new_tokens,
        )
        assert new.table_tokens == request.table_tokens == (target, source)
        assert (
            new.slots(block_tokens)
            == request.slots(block_tokens)
            == reserved_slots(source + target, source, block_tokens)
        )
