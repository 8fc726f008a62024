"""The requests that no group of a model can run, each with a reason that its client can use."""

import math
from typing import Any

import pytest

from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.refusal import ModelBounds, refusal_of
from orca.core.domain.request import Request, SamplingParams
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
    "grammar": "start: /a/" + " " * 70_000,
    "allowed_token_ids": (0, 9),
    "forbidden_token_ids": (1, 8),
    "forbidden_sequences": ((1, 2), (0, 9, 9)),
}


def a_new_request(
    tokens: tuple[int, ...] = (0, 9),
    total: int = 20,
    *,
    prompt_length: int | None = None,
    prefix: tuple[int, ...] = (),
    new: int | None = None,
    **sampling: Any,
) -> NewRequest:
    return NewRequest(
        handle=1,
        request_id="a.0",
        claim=Claim(1, "p/1"),
        tokens=tokens,
        prompt_length=len(tokens) if prompt_length is None else prompt_length,
        max_total_tokens=total,
        sampling=SamplingParams(**sampling),
        decoder_prefix=prefix,
        max_new_tokens=new,
    )


def reason_of(*tokens: Any, **request: Any) -> str | None:
    return refusal_of(a_new_request(*tokens, **request), BOUNDS)


def test_a_request_at_every_bound_is_not_refused_and_fits_into_a_message() -> None:
    assert reason_of() is None
    assert reason_of(**WIDE) is None
    wire.step_to_wire(Step(epoch=Epoch(1, "p"), number=1, new=(a_new_request(**WIDE),)))


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
        ({"allowed_token_ids": (3, 10)}, "allowed_token_ids has 10, which is outside 0 to 9"),
        ({"forbidden_token_ids": (-1,)}, "forbidden_token_ids has -1, which is outside 0 to 9"),
        ({"forbidden_sequences": ((3, 10),)}, "forbidden_sequences has 10, which is outside 0 to 9"),
        ({"forbidden_sequences": ((3, 4), (3,))}, "forbidden_sequences has a sequence of fewer than two tokens"),
        ({"grammar": 5}, "grammar is not a text"),
        ({"min_tokens": 1, "stop_token_ids": (0, *range(2, 10))}, "min_tokens forbids every token of the vocabulary"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_no_kernel_or_message_can_hold_is_refused_with_its_value(request_: dict[str, Any], reason: str) -> None:
    found = reason_of(**request_)
    assert found is not None
    assert found.startswith(reason)


def test_a_model_without_learned_positions_takes_any_length() -> None:
    assert refusal_of(a_new_request((1,), 10**6), ModelBounds(vocab_size=10)) is None


TRANSLATOR = EncoderDecoder(
    encoder_layers=1, start_token_id=2, source_positions=6, target_positions=8, padding_token_id=7
)
WITH_SOURCE = ModelBounds(vocab_size=10, positions=3, eos_token_ids=(1,), encoder_decoder=TRANSLATOR)
AT_ITS_BOUNDS = {"tokens": (0, 9, 1, 3, 4, 5), "prefix": (2, 9), "new": 6, "total": 1000}


def as_a_request(tokens: tuple[int, ...], prefix: tuple[int, ...], new: int, **sampling: Any) -> Request:
    return Request(
        parent="a",
        choice=0,
        revision="r",
        prompt=tokens,
        decoder_prefix=prefix,
        max_new_tokens=new,
        sampling=SamplingParams(**sampling),
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"prompt_length": 4}, None),
        ({"tokens": (0, 10)}, "the prompt has the token id 10, and the model knows only ids from 0 to 9"),
        ({"prefix": (2, 10)}, "decoder_prefix has the token id 10, and the model knows only ids from 0 to 9"),
        ({"prefix": (-1,)}, "decoder_prefix has the token id -1"),
        ({"prefix": ()}, "the request has no decoder_prefix, and the model is an encoder-decoder model: its output"),
        ({"tokens": (1,) * 7}, "the prompt has 7 tokens, and the model's encoder has 6 positions"),
        ({"tokens": (0, 7)}, "the prompt has the padding token 7, and the model has no position for it"),
        ({"prefix": (2, 7)}, "decoder_prefix has the padding token 7, and the model has no position for it"),
        ({"new": 7}, "decoder_prefix and output have 9 tokens, and the model's decoder has 8 positions"),
        ({"prompt_logprobs": 0}, "prompt_logprobs is set"),
        ({"top_p": 1.5}, "top_p has 1.5"),
    ],
    ids=str,
)
def test_source_and_target_have_their_own_bounds(change: dict[str, Any], reason: str | None) -> None:
    """A stage decides so, whatever its scheduler has reserved, and a scheduler decides the same."""
    changed = AT_ITS_BOUNDS | change
    found = [refusal_of(a_new_request(**changed), WITH_SOURCE)]
    if "prompt_length" not in changed:
        del changed["total"]
        found.append(refusal_of(as_a_request(**changed), WITH_SOURCE))
    for each in found:
        assert each is None if reason is None else each is not None and each.startswith(reason)


def test_a_model_without_positions_takes_a_source_and_a_target_of_any_length() -> None:
    model = EncoderDecoder(encoder_layers=1, start_token_id=2)
    bounds = ModelBounds(vocab_size=10, encoder_decoder=model)
    assert refusal_of(a_new_request((1,) * 9999, prefix=(2,), new=9999), bounds) is None


def test_a_decoder_only_model_refuses_a_decoder_prefix() -> None:
    reason = reason_of(prefix=(2,), new=3)
    assert reason is not None
    assert reason.startswith("the request has a decoder_prefix, and the model is a decoder-only model")
