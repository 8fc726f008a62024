"""Parts of token masks for tests of samplers."""

from collections.abc import Sequence

from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Claim, NewRequest
from orca.core.grammars.matching import GrammarVocabulary
from orca.worker.masks.request_mask import ModelMasks
from orca.worker.masks.token_masks import TokenMasks


def unread() -> GrammarVocabulary:
    """Stand in for the vocabulary where no request has a grammar."""
    raise AssertionError("a request without a grammar reads no vocabulary")


def no_masks(vocab_size: int) -> TokenMasks:
    """Return the masks of a sampler whose requests have none."""
    return TokenMasks(ModelMasks(vocab_size, (), (), unread), threads=1)


def a_new_request(handle: int, sampling: SamplingParams, output: Sequence[int] = ()) -> NewRequest:
    """Return a request with a prompt of one token, and with this log."""
    return NewRequest(
        handle=handle,
        request_id=f"r{handle}",
        claim=Claim(1, "call"),
        tokens=(2, *output),
        prompt_length=1,
        max_total_tokens=50,
        sampling=sampling,
    )
