"""The requests that no group of a model can run, each with a reason that its client can use."""

import math
from typing import Any

import pytest

from orca.core.domain.refusal import ModelBounds, refusal_of
from orca.core.domain.request import SamplingParams
from orca.core.domain.step import Claim, Epoch, NewRequest, Step
from orca.core.transport import wire

BOUNDS = ModelBounds(vocab_size=10, positions=20, eos_token_ids=(1,))
WIDE = {
    "temperature": 2.0,
    "top_k": 2**31 - 1,
    "top_p": 1.0,
    "min_p": 1.0,
    "repetition_penalty": 10.0,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "logit_bias": ((0, -100.0), (9, 100.0)),
    "seed": 2**63 - 1,
    "logprobs": 20,
    "prompt_logprobs": 0,
    "min_tokens": 19,
    "stop_token_ids": (0, 9),
}


def reason_of(tokens: tuple[int, ...] = (0, 9), total: int = 20, **sampling: Any) -> str | None:
    return refusal_of(tokens, total, SamplingParams(**sampling), BOUNDS)


def test_a_request_at_every_bound_is_not_refused_and_fits_into_a_message() -> None:
    assert reason_of() is None
    assert reason_of(**WIDE) is None
    new = NewRequest(
        handle=1,
        request_id="a.0",
        claim=Claim(1, "p/1"),
        tokens=(0, 9),
        prompt_length=2,
        max_total_tokens=20,
        sampling=SamplingParams(**WIDE),
    )
    wire.step_to_wire(Step(epoch=Epoch(1, "p"), number=1, new=(new,)))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"tokens": ()}, "the prompt has no tokens"),
        ({"tokens": (3, 10, 12)}, "the prompt has the token id 10, and the model knows only ids from 0 to 9"),
        ({"tokens": (-1, 3)}, "the prompt has the token id -1"),
        ({"tokens": (2**40,)}, f"the prompt has the token id {2**40}"),
        ({"total": 21}, "prompt and output have 21 tokens, and the model has 20 positions"),
        ({"temperature": -0.5}, "temperature has -0.5, which is outside 0"),
        ({"temperature": math.nan}, "temperature has nan"),
        ({"temperature": None}, "temperature has None"),
        ({"temperature": math.inf}, "temperature has inf"),
        ({"top_k": -1}, "top_k has -1"),
        ({"top_k": 2**31}, "top_k has 2147483648"),
        ({"top_p": 1.5}, "top_p has 1.5, which is outside 0 to 1"),
        ({"min_p": math.nan}, "min_p has nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty has 0.0"),
        ({"presence_penalty": math.inf}, "presence_penalty has inf"),
        ({"frequency_penalty": -3.0}, "frequency_penalty has -3.0"),
        ({"logit_bias": ((10, 1.0),)}, "logit_bias has 10, which is outside 0 to 9"),
        ({"logit_bias": ((1, math.inf),)}, "logit_bias has inf"),
        ({"seed": -1}, "seed has -1"),
        ({"seed": 2**63}, f"seed has {2**63}"),
        ({"min_tokens": 2**31}, "min_tokens has 2147483648"),
        ({"logprobs": -1}, "logprobs has -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs has -1"),
        ({"stop_token_ids": (10,)}, "stop_token_ids has 10, which is outside 0 to 9"),
        ({"min_tokens": 1, "stop_token_ids": (0, *range(2, 10))}, "min_tokens forbids every token of the vocabulary"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_no_kernel_or_message_can_hold_is_refused_with_its_value(request_: dict[str, Any], reason: str) -> None:
    found = reason_of(**request_)
    assert found is not None
    assert found.startswith(reason)


def test_a_model_without_learned_positions_takes_any_length() -> None:
    assert refusal_of((1,), 10**6, SamplingParams(), ModelBounds(vocab_size=10)) is None
