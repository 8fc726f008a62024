"""Rendering is a pure function of the log: the same bytes from any index, and the bytes that clients expect."""

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca.core.domain.request import End, FinishReason, Logprob, Request, Token
from orca.gateway.render.render import (
    AnswerKind,
    ChoiceStream,
    RenderModel,
    RenderOptions,
    stream_end,
    whole_answer,
    whole_choice,
)
from support.gateway.gateway_rig import WORDS, eos, events, ids, make_request, scripted, tokenizer

READING = RenderModel(tokenizer(), frozenset({0}))


def rendering(kind: AnswerKind = AnswerKind.COMPLETION, **fields: Any) -> RenderOptions:
    return RenderOptions(kind=kind, model="tiny", created=1_700_000_000, **fields)


def stream(request: Request, how: RenderOptions, tokens: Sequence[Token], end: End) -> list[bytes]:
    """Every event, one by one."""
    one = ChoiceStream(request, how, READING)
    return [*(one.token(token) for token in tokens), one.end(end)]


def answer_of(request: Request, how: RenderOptions, tokens: Sequence[Token], end: End) -> dict[str, Any]:
    """The answer that is not streamed."""
    answer: dict[str, Any] = orjson.loads(
        whole_answer([request], how, [whole_choice(request, how, tokens, end, READING)], [end])
    )
    return answer


def texts(found: Sequence[bytes]) -> list[str]:
    choices = [data["choices"][0] for _, data in events(b"".join(found))]
    return [choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices]


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


OPTIONS = [
    {},
    {"echo": True},
    {"event_ids": True},
    {"include_usage": True},
    {"include_usage": True, "continuous_usage": True, "return_token_ids": True},
]


@pytest.mark.parametrize("kind", [AnswerKind.COMPLETION, AnswerKind.CHAT])
@pytest.mark.parametrize("options", OPTIONS, ids=[",".join(options) or "plain" for options in OPTIONS])
@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2, "prompt_logprobs": 2}, {"stop": (" and",)}], ids=str)
def test_a_second_gateway_writes_the_same_bytes_from_every_index(
    kind: AnswerKind, options: dict[str, bool], sampling: dict[str, Any]
) -> None:
    request, how = make_request(**sampling), rendering(kind, **options)
    tokens, end = scripted(request, ids(WORDS + "<|end|>"))
    whole = stream(request, how, tokens, end)
    for index in range(len(tokens) + 1):
        second = ChoiceStream(request, RenderOptions.from_json(how.to_json()), READING)
        for token in tokens[:index]:
            second.token(token)
        rest = [*(second.token(token) for token in tokens[index:]), second.end(end)]
        assert rest == whole[index:]


@pytest.mark.parametrize("kind", [AnswerKind.COMPLETION, AnswerKind.CHAT])
@given(data=st.data())
def test_the_events_of_a_stream_join_to_the_whole_answer(data: st.DataObject, kind: AnswerKind) -> None:
    text = data.draw(st.text("ab 🐋é<|end|>", max_size=30)) + "x"
    request = make_request(stop=tuple(data.draw(st.lists(st.sampled_from(["ab", "🐋", " a"]), max_size=2))), logprobs=1)
    tokens, end = scripted(request, ids(text))
    how = rendering(kind, echo=kind is AnswerKind.COMPLETION and data.draw(st.booleans()))
    answer = answer_of(request, how, tokens, end)
    choice = answer["choices"][0]
    assert "".join(texts(stream(request, how, tokens, end))) == text_of(choice)
    assert answer["usage"]["completion_tokens"] == len(tokens)


def test_there_is_one_event_per_token_and_one_for_the_end() -> None:
    request = make_request()
    tokens, end = scripted(request, ids(WORDS))
    found = list(events(b"".join(stream(request, rendering(event_ids=True), tokens, end))))
    assert [event_id for event_id, _ in found] == [*(f"0.{i}" for i in range(len(tokens))), "0.end"]
    reasons = [data["choices"][0]["finish_reason"] for _, data in found]
    assert reasons == [None] * len(tokens) + ["length"]


def test_event_ids_are_left_out_unless_asked_for() -> None:
    request = make_request()
    tokens, end = scripted(request, ids("a"))
    assert all(event.startswith(b"data: ") for event in stream(request, rendering(), tokens, end))


def test_the_bytes_of_a_completion_event_are_fixed() -> None:
    request = make_request(choice=3)
    one = ChoiceStream(request, rendering(include_usage=True, event_ids=True), READING)
    assert one.token(Token(ids("a")[0])) == (
        b'id: 3.0\ndata: {"id":"p","object":"text_completion","created":1700000000,"model":"tiny","choices":'
        b'[{"index":3,"text":"a","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    )
    assert one.end(End(FinishReason.LENGTH, 1)) == (
        b'id: 3.end\ndata: {"id":"p","object":"text_completion","created":1700000000,"model":"tiny","choices":'
        b'[{"index":3,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null}\n\n'
    )


def test_the_first_event_of_a_chat_has_the_role() -> None:
    request = make_request()
    tokens, end = scripted(request, ids("ab"))
    deltas = [
        data["choices"][0]["delta"]
        for _, data in events(b"".join(stream(request, rendering(AnswerKind.CHAT), tokens, end)))
    ]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]


def test_a_chat_that_ends_without_a_token_still_has_a_role() -> None:
    event = ChoiceStream(make_request(), rendering(AnswerKind.CHAT), READING).end(End(FinishReason.STOP, 0))
    (_, data), *_ = events(event)
    assert data["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_eos_has_an_event_and_no_text() -> None:
    request = make_request()
    tokens, end = scripted(request, (*ids("ab"), eos(), *ids("c")))
    assert (end.reason, "".join(texts(stream(request, rendering(), tokens, end)))) == (FinishReason.STOP, "ab")


def test_a_stop_token_id_is_reported_and_has_no_text() -> None:
    (stop,) = ids("!")
    request = make_request(stop_token_ids=(stop,))
    tokens, end = scripted(request, ids("ab!c"))
    found = stream(request, rendering(), tokens, end)
    assert "".join(texts(found)) == "ab"
    assert next(events(found[-1]))[1]["choices"][0]["stop_reason"] == stop


def test_a_stop_token_within_min_tokens_is_text() -> None:
    (stop,) = ids("!")
    request = make_request(stop_token_ids=(stop,), min_tokens=1)
    tokens, end = scripted(request, ids("!a!b"))
    assert "".join(texts(stream(request, rendering(), tokens, end))) == "!a"


def test_text_before_a_stop_string_is_held_back_and_sent_at_the_end() -> None:
    request = make_request(stop=("bx",))
    tokens, end = scripted(request, ids("a") + ids("b"))
    assert texts(stream(request, rendering(), tokens, end)) == ["a", "", "b"]


def test_a_found_stop_string_is_never_sent() -> None:
    request = make_request(stop=("bx",))
    tokens, end = scripted(request, ids("a") + ids("b") + ids("x") + ids("c"))
    found = stream(request, rendering(), tokens, end)
    assert texts(found) == ["a", "", "", ""]
    assert next(events(found[-1]))[1]["choices"][0]["stop_reason"] == "bx"


def test_usage_counts_a_prompt_with_several_choices_once() -> None:
    requests = [make_request("the fox", choice=i) for i in range(2)] + [make_request("a", choice=i) for i in (2, 3)]
    ends = [End(FinishReason.LENGTH, count) for count in (1, 2, 3, 4)]
    tail = stream_end(requests, rendering(include_usage=True, choices_per_prompt=2), ends)
    (_, usage), (_, done) = events(tail)
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == len(ids("the fox")) + 1
    assert usage["usage"]["completion_tokens"] == 10
    assert done == "[DONE]"


def test_only_the_done_event_has_the_id_end_so_that_usage_is_resent_after_a_resume() -> None:
    tail = stream_end([make_request()], rendering(include_usage=True, event_ids=True), [End(FinishReason.STOP, 1)])
    assert [event_id for event_id, _ in events(tail)] == [None, "end"]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FinishReason.CANCELLED, "cancelled"),
        (FinishReason.DEADLINE_EXCEEDED, "deadline_exceeded"),
        (FinishReason.MODEL_REPLACED, "model_replaced"),
        (FinishReason.ERROR, "failed"),
        (FinishReason.REFUSED, "request_refused"),
    ],
)
def test_a_failed_choice_ends_in_an_error_event_and_no_done_follows(reason: FinishReason, code: str) -> None:
    request, how = make_request(), rendering(event_ids=True)
    ((event_id, data),) = events(ChoiceStream(request, how, READING).end(End(reason, 0)))
    assert (event_id, data["error"]["code"]) == ("0.end", code)
    assert stream_end([request], how, [End(reason, 0)]) == b""


def test_completion_logprobs_are_parallel_lists_with_offsets_into_the_text() -> None:
    request = make_request("ab", logprobs=1, prompt_logprobs=1)
    tokens, end = scripted(request, ids("c🐋d"))
    answer = answer_of(request, rendering(echo=True), tokens, end)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abc🐋d"
    assert {len(column) for column in logprobs.values()} == {len(request.prompt) + len(tokens)}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    unbroken = [i for i, text in enumerate(logprobs["tokens"]) if not text.startswith("bytes:")]
    assert all(choice["text"].startswith(logprobs["tokens"][i], logprobs["text_offset"][i]) for i in unbroken)
    assert logprobs["text_offset"][-1] == len("abc🐋")


def test_chat_logprobs_carry_bytes_so_that_split_characters_can_be_joined() -> None:
    request = make_request(logprobs=2)
    tokens, end = scripted(request, ids("🐋"))
    answer = answer_of(request, rendering(AnswerKind.CHAT), tokens, end)
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "🐋"
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(tokens)


def test_minus_infinity_is_written_as_a_number() -> None:
    token = Token(ids("a")[0], Logprob(ids("a")[0], float("-inf")))
    event = ChoiceStream(make_request(logprobs=0), rendering(), READING).token(token)
    ((_, data),) = events(event)
    assert data["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize("kind", [AnswerKind.COMPLETION, AnswerKind.CHAT])
def test_each_chunk_has_its_token_ids_and_the_first_those_of_the_prompt(kind: AnswerKind) -> None:
    request = make_request()
    tokens, end = scripted(request, ids("ab"))
    found = [data for _, data in events(b"".join(stream(request, rendering(kind, return_token_ids=True), tokens, end)))]
    assert [i for data in found for i in data["choices"][0]["token_ids"]] == [token.id for token in tokens]
    first = found[0] if kind is AnswerKind.CHAT else found[0]["choices"][0]
    assert tuple(first["prompt_token_ids"]) == request.prompt
    assert sum("prompt_token_ids" in str(data) for data in found) == 1
