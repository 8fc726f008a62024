"""Requests, tokens and ends come out of their bytes as they went in."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from orca.core.domain.request import End, FinishReason, Logprob, Request, SamplingParams, Token
from orca.pool import codec

ids = st.integers(0, 2**32 - 1)
floats = st.floats(allow_nan=False)
logprobs = st.builds(Logprob, ids, floats, st.lists(st.tuples(ids, floats), max_size=3).map(tuple))
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.none() | st.integers(1, 1000),
    logit_bias=st.lists(st.tuples(ids, st.floats(-100, 100)), max_size=3).map(tuple),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    stop=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), max_size=3).map(tuple),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    grammar=st.none() | st.text(st.characters(exclude_categories=("Cs",))),
    allowed_token_ids=st.lists(ids, max_size=3).map(tuple),
    forbidden_token_ids=st.lists(ids, max_size=3).map(tuple),
    forbidden_sequences=st.lists(st.lists(ids, min_size=2, max_size=3).map(tuple), max_size=3).map(tuple),
)
requests = st.builds(
    Request,
    parent=st.text("abc-09", min_size=1),
    choice=st.integers(0, 9),
    revision=st.text("abc09", min_size=1),
    prompt=st.lists(ids, min_size=1, max_size=20).map(tuple),
    max_new_tokens=st.integers(1, 10**6),
    sampling=samplings,
    deadline_ms=st.none() | st.integers(0, 2**50),
    first_token_deadline_ms=st.none() | st.integers(0, 2**50),
    traceparent=st.none() | st.text("0123456789abcdef-"),
    decoder_prefix=st.lists(ids, max_size=3).map(tuple),
    weight=st.none() | st.floats(0, 100),
    cache_salt=st.none() | st.text("abc", min_size=0),
    key_hash=st.none() | st.text("0123456789abcdef"),
    head_hash=st.none() | st.text("0123456789abcdef"),
    arrival=st.integers(1, 2**40),
    submitted_ms=st.integers(1, 2**50),
)


@settings(max_examples=60)
@given(requests)
def test_a_request_is_decoded_as_it_was_encoded(request: Request) -> None:
    body = codec.pack_body(request)
    assert codec.unpack_body(body, arrival=request.arrival, submitted_ms=request.submitted_ms) == request


@settings(max_examples=60)
@given(st.lists(requests, max_size=3), st.integers(1, 3))
def test_choices_that_share_a_prompt_are_packed_as_each_alone(prompts: list[Request], choices: int) -> None:
    call = [replace(request, choice=choice) for request in prompts for choice in range(choices)]
    assert codec.pack_bodies(call) == [codec.pack_body(request) for request in call]


@settings(max_examples=100)
@given(st.builds(Token, ids, st.none() | logprobs, st.lists(logprobs, max_size=3).map(tuple), st.none() | ids))
def test_a_token_is_decoded_as_it_was_encoded_and_fits_its_reservation(token: Token) -> None:
    value = codec.pack_token(token)
    assert codec.unpack_token(value) == token
    if token.logprob is not None and not token.prompt_logprobs and token.cached_prompt_tokens is None:
        assert len(value) <= codec.token_bytes(SamplingParams(logprobs=len(token.logprob.top)))


def test_an_end_is_decoded_as_it_was_encoded() -> None:
    for stop in (None, "a\n stop", 50_256, ""):
        end = End(FinishReason.STOP, 3, stop)
        assert codec.unpack_end(b"stop", b"3", codec.pack_stop(end)) == end


def test_a_refusal_survives_its_fields_and_is_an_error_to_the_release_before() -> None:
    for detail in ("the prompt has the token id 9", ""):
        end = End(FinishReason.REFUSED, 3, detail=detail)
        assert codec.pack_reason(end) == "error"
        assert codec.unpack_end(codec.pack_reason(end).encode(), b"3", codec.pack_stop(end)) == end
    failed = End(FinishReason.ERROR, 3)
    assert codec.unpack_end(codec.pack_reason(failed).encode(), b"3", codec.pack_stop(failed)) == failed


def test_a_plain_token_is_its_decimal_id() -> None:
    assert codec.pack_token(Token(50_256)) == b"50256"
