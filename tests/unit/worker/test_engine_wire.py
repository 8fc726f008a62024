"""orca.core.transport.wire: what goes over the wire comes back equal, every field of it."""

from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca.core.domain.errors import EngineError
from orca.core.domain.request import Logprob, SamplingParams, Token
from orca.core.domain.step import (
    Claim,
    Epoch,
    NewRequest,
    Part,
    PrefixBlocks,
    Refused,
    Row,
    Sampled,
    StageTiming,
    Step,
    StepResult,
)
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import wire

INT32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(0, 2**63 - 1)
DOUBLE = st.floats(allow_nan=False)
FLOAT = st.floats(allow_nan=False, width=32)

epochs = st.builds(Epoch, INT64, st.text())
sampling_params = st.builds(
    SamplingParams,
    temperature=DOUBLE,
    top_k=st.none() | st.integers(1, 2**31 - 1),
    top_p=DOUBLE,
    min_p=DOUBLE,
    repetition_penalty=DOUBLE,
    presence_penalty=DOUBLE,
    frequency_penalty=DOUBLE,
    logit_bias=st.lists(st.tuples(INT32, DOUBLE), max_size=3).map(tuple),
    seed=INT64,
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    min_tokens=INT32,
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(INT32, max_size=3).map(tuple),
    grammar=st.none() | st.text(min_size=1),
    allowed_token_ids=st.lists(INT32, max_size=3).map(tuple),
    forbidden_token_ids=st.lists(INT32, max_size=3).map(tuple),
    forbidden_sequences=st.lists(st.lists(INT32, min_size=2, max_size=3).map(tuple), max_size=3).map(tuple),
)
prefix_blocks = st.builds(PrefixBlocks, INT64, INT32)
new_requests = st.builds(
    NewRequest,
    handle=INT64,
    request_id=st.text(),
    claim=st.builds(Claim, INT64, st.text()),
    tokens=st.lists(INT32, max_size=5).map(tuple),
    prompt_length=INT32,
    max_total_tokens=INT32,
    sampling=sampling_params,
    decoder_prefix=st.lists(INT32, max_size=3).map(tuple),
    max_new_tokens=st.none() | st.integers(1, 2**31 - 1),
    prefix=st.none() | prefix_blocks,
)


def rows(*parts: Part) -> st.SearchStrategy[tuple[Row, ...]]:
    row = st.builds(
        Row,
        handle=INT64,
        start=INT32,
        count=INT32,
        sample=st.booleans(),
        token=st.none() | INT32,
        part=st.sampled_from(parts),
    )
    return st.lists(row, max_size=3).map(tuple)


steps = st.builds(
    Step,
    epoch=epochs,
    number=INT64,
    freed=st.lists(INT64, max_size=3).map(tuple),
    kept=st.lists(INT64, max_size=3).map(tuple),
    evicted=st.lists(prefix_blocks, max_size=3).map(tuple),
    new=st.lists(new_requests, max_size=2).map(tuple),
    rows=rows(Part.UNSPECIFIED) | rows(Part.SOURCE, Part.TARGET),
    lane=INT32,
)
logprobs = st.builds(Logprob, INT32, FLOAT, st.lists(st.tuples(INT32, FLOAT), max_size=3).map(tuple))
# No stage reports cached prompt tokens: the scheduler knows them.
tokens = st.builds(
    Token,
    INT32,
    logprob=st.none() | logprobs,
    prompt_logprobs=st.lists(logprobs, max_size=2).map(tuple),
    cached_prompt_tokens=st.none(),
)
results = st.builds(
    StepResult,
    epoch=epochs,
    number=INT64,
    sampled=st.lists(st.builds(Sampled, INT64, INT32, tokens), max_size=3).map(tuple),
    refused=st.lists(st.builds(Refused, INT64, st.text()), max_size=2).map(tuple),
    timing=st.none() | st.builds(StageTiming, stage=INT32, received_ns=INT64, start_ns=INT64, end_ns=INT64),
)


@settings(max_examples=60)
@given(steps)
def test_a_step_is_decoded_as_it_was_encoded(step: Step) -> None:
    message = pb.StepMessage.FromString(wire.step_to_wire(step).SerializeToString())
    assert wire.step_from_wire(message) == step


@settings(max_examples=60)
@given(results)
def test_a_result_is_decoded_as_it_was_encoded(result: StepResult) -> None:
    message = pb.ResultMessage.FromString(wire.result_to_wire(result).SerializeToString())
    assert wire.result_from_wire(message) == result


def test_stop_strings_are_not_sent_to_stages() -> None:
    sampling = SamplingParams(stop=("\n\n",), seed=3)
    new = NewRequest(
        handle=1,
        request_id="r.0",
        claim=Claim(1, "p/1"),
        tokens=(5,),
        prompt_length=1,
        max_total_tokens=2,
        sampling=sampling,
    )
    step = Step(epoch=Epoch(1, "p"), number=1, new=(new,))
    [arrived] = wire.step_from_wire(wire.step_to_wire(step)).new
    assert arrived.sampling == replace(sampling, stop=())


DECIDE_TOKENS = (
    "SamplingParams",
    "TokenSequence",
    "NewRequest",
    "PrefixBlocks",
    "Row",
    "StepMessage",
    "Logprob",
    "Sampled",
    "Refused",
    "ResultMessage",
)
CONTRACTS = {1: "0f215eb45354dfa7", 2: "49aefa08a2466c0d", 3: "fa52bb396bddf456", 4: "7b5b14a3f93c094c"}
"""Digests of the messages that decide tokens, by contract number. The first change since the last release adds a
line and raises wire.CONTRACT: a stage drops fields that it does not know, and would compute something else. A further
change before the next release replaces the digest of the last line.
"""


def test_a_change_of_messages_that_decide_tokens_raises_the_contract_number() -> None:
    messages = [pb.DESCRIPTOR.message_types_by_name[name] for name in DECIDE_TOKENS]
    fields = [
        (message.name, field.name, field.number, field.type, field.is_repeated, field.has_presence)
        for message in messages
        for field in message.fields
    ]
    assert CONTRACTS[wire.CONTRACT] == sha256(repr(fields).encode()).hexdigest()[:16]


def test_a_release_without_a_contract_number_has_the_first() -> None:
    if wire.CONTRACT == 1:
        wire.require_same_contract(0, "stage 0")
    with pytest.raises(EngineError, match=f"stage 0 is of another release: it has contract 99 .* {wire.CONTRACT}$"):
        wire.require_same_contract(99, "stage 0")
