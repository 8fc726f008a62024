"""Calls to an encoder-decoder model: the prompt is the source, the answer is the target."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from orca.core.domain.request import Request, SamplingParams, Token, tokens_of_any_split
from orca.core.domain.text import Tokenizer
from orca.gateway.calls.bodies import ChatBody, CompletionBody
from orca.gateway.calls.idempotency import body_digest
from orca.gateway.models.models import PromisedSlots, load_newest
from orca.gateway.render.render import AnswerKind, ChoiceStream, RenderModel, RenderOptions
from orca.gateway.settings import GatewaySettings
from support.core.odd_tokenizers import unigram, write_folder
from support.gateway.gateway_rig import SLOTS, FakeScheduler, Rig, error_of, events, rig, until
from support.gateway.target_rig import BLOCK_TOKENS, ids_of, model_of, served, source_of, target_rig, tokenizer

SOURCE, ANSWER = "the quick fox", "the lazy dog"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "the fox"}]


def streamed_text(text: str, *, chat: bool = False) -> str:
    """Return the text of a stream's events."""
    chunks = [data for _, data in events(text) if data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") if chat else choice["text"] for choice in choices)


@pytest.mark.parametrize("kind", ["t5", "bart", "nllb"])
async def test_the_answer_is_the_text_of_the_target_alone(kind: str) -> None:
    async with target_rig(kind) as (one, found):
        whole = await one.complete(prompt=SOURCE)
        streamed = await one.post(COMPLETIONS, prompt=SOURCE, max_tokens=50, stream=True)
        assert whole["choices"][0]["text"] == ANSWER == streamed_text(streamed.text)
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert {request.prompt for request in found} == {source_of(kind, SOURCE)}
        assert len(source_of(kind, SOURCE)) > len(ids_of(kind, SOURCE)), "special tokens are part of the source"
        assert whole["usage"]["prompt_tokens"] == len(source_of(kind, SOURCE))


async def test_every_request_begins_with_the_start_token() -> None:
    async with target_rig() as (one, found):
        texts = await one.complete(prompt=["the fox", "the dog"], n=2)
        await one.complete(prompt=[5, 6, 1])
        assert [request.prompt for request in found] == [
            *[source_of("t5", "the fox")] * 2, *[source_of("t5", "the dog")] * 2, (5, 6, 1),
        ]  # fmt: skip
        assert {request.decoder_prefix for request in found} == {(0,)}
        assert [choice["text"] for choice in texts["choices"]] == [ANSWER] * 4
        sources = len(source_of("t5", "the fox")) + len(source_of("t5", "the dog"))
        assert texts["usage"]["prompt_tokens"] == sources


async def test_special_tokens_around_the_source_may_be_left_out() -> None:
    async with target_rig() as (one, found):
        await one.complete(prompt=SOURCE, add_special_tokens=False)
        assert found[0].prompt == ids_of("t5", SOURCE)


GERMAN = tokenizer("nllb")._inner.token_to_id("deu_Latn")
FRENCH = tokenizer("nllb")._inner.token_to_id("fra_Latn")
PREFIXES: list[tuple[Any, tuple[int, ...], int]] = [
    # decoder_prefix, the beginning of the target after the start token, tokens that count as prompt
    (None, (FRENCH,), 0),
    ("", (FRENCH,), 0),
    ([], (FRENCH,), 0),
    ("deu_Latn", (GERMAN,), 1),
    ([GERMAN], (GERMAN,), 1),
    ([float(GERMAN)], (GERMAN,), 1),
    ([2, GERMAN], (GERMAN,), 1),
    ([2], (FRENCH,), 0),
    ("fra_Latn", (FRENCH,), 1),
    ("deu_Latn the", (GERMAN, *ids_of("nllb", "the")), 1 + len(ids_of("nllb", "the"))),
    ("the dog", ids_of("nllb", "the dog"), len(ids_of("nllb", "the dog"))),
    ([2, 2, 5], (2, 5), 2),
]


@pytest.mark.parametrize(("prefix", "beginning", "counted"), PREFIXES, ids=[str(row[0]) for row in PREFIXES])
async def test_a_prefix_begins_the_target_and_counts_as_prompt(
    prefix: Any, beginning: tuple[int, ...], counted: int
) -> None:
    async with target_rig("nllb", forced_bos_token_id=FRENCH, has_template=True) as (one, found):
        answer = await one.complete(prompt=SOURCE, decoder_prefix=prefix, n=2)
        chat = await one.chat(decoder_prefix=prefix)
        stream = await one.post(
            COMPLETIONS, prompt=SOURCE, decoder_prefix=prefix, stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )  # fmt: skip
        assert {request.decoder_prefix for request in found} == {(2, *beginning)}
        # After words that the call gave, the answer goes on with a space.
        text = f" {ANSWER}" if isinstance(prefix, str) and "the" in prefix else ANSWER
        assert answer["choices"][0]["text"] == text == chat["choices"][0]["message"]["content"]
        assert streamed_text(stream.text) == text
        prompt_tokens = len(source_of("nllb", SOURCE)) + counted
        assert answer["usage"]["prompt_tokens"] == prompt_tokens
        assert chat["usage"]["prompt_tokens"] == len(found[2].prompt) + counted
        chunks = [data for _, data in events(stream.text) if data != "[DONE]"]
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt_tokens}


async def test_the_source_of_a_chat_is_its_rendered_text() -> None:
    async with target_rig(has_template=True) as (one, found):
        answer = await one.chat(messages=MESSAGES)
        assert found[0].prompt == ids_of("t5", "<|user|>user: the fox\nassistant:")
        assert answer["choices"][0]["message"]["content"] == ANSWER
        stream = await one.post(CHAT, messages=MESSAGES, stream=True)
        assert streamed_text(stream.text, chat=True) == ANSWER


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, 1, 6]}, "prompt"),
        ({"prompt": [[5], [5, 1]]}, "prompt[1]"),
        ({"prompt": "the <pad> fox"}, "prompt"),
        ({"prompt": [5], "decoder_prefix": [6, 1]}, "decoder_prefix"),
        ({"prompt": [5], "decoder_prefix": "<pad>"}, "decoder_prefix"),
        ({"messages": [{"role": "user", "content": "the <pad>"}]}, "messages"),
    ],
    ids=str,
)
async def test_padding_without_a_position_is_refused_by_the_name_of_its_field(
    fields: dict[str, Any], param: str
) -> None:
    assert ids_of("nllb", "<pad>") == (1,)
    path = CHAT if "messages" in fields else COMPLETIONS
    async with target_rig("nllb", padding_token_id=1, has_template=True) as (one, found):
        answer = await one.post(path, **fields)
        status, error = error_of(answer)
        assert (status, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param}: has the padding token, id 1, and this model has no position")
        assert not found
    async with target_rig("nllb", has_template=True) as (one, found):
        assert (await one.post(path, **fields)).status_code == 200, "other models take it like any token"


LONG = "the fox " * 40
BAD: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    # path, fields, code, param, a part of the message
    "echo": (COMPLETIONS, {"echo": True}, "unsupported_parameter", "echo", "does not continue the prompt"),
    "log probabilities of the prompt": (
        COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 0}, "unsupported_parameter", "echo", "echo: ",
    ),
    "vLLM's name for them": (COMPLETIONS, {"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs", ""),
    "no token": (COMPLETIONS, {"max_tokens": 0}, "invalid_value", "max_tokens", "must be at least 1"),
    "suffix": (COMPLETIONS, {"suffix": "x"}, "unsupported_parameter", "suffix", "'suffix' is not supported"),
    "beams": (COMPLETIONS, {"num_beams": 4}, "unsupported_parameter", "num_beams", ""),
    "beams of vLLM": (COMPLETIONS, {"use_beam_search": True}, "unsupported_parameter", "use_beam_search", ""),
    "beams of TensorRT-LLM": (COMPLETIONS, {"beam_width": 2}, "unsupported_parameter", "beam_width", ""),
    "length penalty": (COMPLETIONS, {"length_penalty": 2.0}, "unsupported_parameter", "length_penalty", ""),
    "best of": (COMPLETIONS, {"best_of": 3}, "invalid_value", "best_of", "only n"),
    "a prefix of another type": (
        COMPLETIONS, {"decoder_prefix": 5}, "invalid_value", "decoder_prefix", "must be text or a list of token ids",
    ),
    "a prefix of texts": (
        COMPLETIONS, {"decoder_prefix": ["the"]}, "invalid_value", "decoder_prefix", "'the' is not a token id",
    ),
    "a prefix with an unknown id": (
        COMPLETIONS, {"decoder_prefix": [5, 9999]}, "invalid_value", "decoder_prefix", "9999 is not a token id",
    ),
    "a prefix with a negative id": (
        COMPLETIONS, {"decoder_prefix": [-1]}, "invalid_value", "decoder_prefix", "-1 is not a token id",
    ),
    "a prefix with true": (
        COMPLETIONS, {"decoder_prefix": [True]}, "invalid_value", "decoder_prefix", "true is not a token id",
    ),
    "a prefix that fills the target": (
        COMPLETIONS, {"decoder_prefix": [5] * 29}, "context_length_exceeded", "decoder_prefix",
        "is 30 tokens for the target. However, its beginning has 30 tokens",
    ),
    "a prefix that fills it with max_tokens": (
        COMPLETIONS, {"decoder_prefix": [5] * 29, "max_tokens": 1}, "context_length_exceeded", "decoder_prefix", "30",
    ),
    "a target that is too long": (
        COMPLETIONS, {"max_tokens": 30}, "context_length_exceeded", "max_tokens",
        "is 30 tokens for the target. However, you requested 31 tokens (1 at its beginning, 30 in the completion)",
    ),
    "a target that is too long with its prefix": (
        COMPLETIONS, {"decoder_prefix": [5, 6], "max_tokens": 28}, "context_length_exceeded", "max_tokens",
        "you requested 31 tokens (3 at its beginning, 28 in the completion)",
    ),
    "a source that is too long": (
        COMPLETIONS, {"prompt": [5] * 41}, "context_length_exceeded", "prompt",
        "is 40 tokens for the source. However, your messages resulted in 41 tokens",
    ),
    "a text that is too long": (
        COMPLETIONS, {"prompt": LONG}, "context_length_exceeded", "prompt",
        f"is 40 tokens for the source. However, your messages resulted in {len(source_of('t5', LONG))} tokens",
    ),
    "one source of several": (
        COMPLETIONS, {"prompt": [[5], [5] * 41]}, "context_length_exceeded", "prompt", "resulted in 41 tokens",
    ),
    "both together": (
        COMPLETIONS, {"prompt": [5] * 40, "max_tokens": 20}, "context_length_exceeded", "max_tokens",
        "However, you requested 61 tokens (40 in the messages, 1 at the beginning of the target, 20 in the completion)",
    ),
    "both together, with a prefix": (
        COMPLETIONS, {"prompt": [5] * 40, "decoder_prefix": [5] * 19}, "context_length_exceeded", "decoder_prefix",
        "is 60 tokens for source and target together. However, you requested 61 tokens",
    ),
    "no source": (COMPLETIONS, {"prompt": []}, "invalid_value", "prompt", "must be text or token ids"),
    "a chat whose source is too long": (
        CHAT, {"messages": [{"role": "user", "content": LONG}]}, "context_length_exceeded", "messages", "40 tokens for",
    ),
    "a chat whose target is too long": (
        CHAT, {"max_completion_tokens": 30}, "context_length_exceeded", "max_completion_tokens", "30 tokens for the",
    ),
    "a chat with a wrong prefix": (
        CHAT, {"decoder_prefix": [9999]}, "invalid_value", "decoder_prefix", "9999 is not a token id",
    ),
    "a chat with echo": (CHAT, {"echo": True}, "unsupported_parameter", "echo", ""),
}  # fmt: skip
BOUNDS = {"max_model_len": 60, "source_positions": 40, "target_positions": 30}


@pytest.mark.parametrize("name", BAD)
async def test_what_such_a_model_cannot_do_is_refused_naming_the_field(name: str) -> None:
    path, fields, code, param, words = BAD[name]
    usual = {"messages": MESSAGES} if path == CHAT else {"prompt": SOURCE}
    async with target_rig(has_template=True, **BOUNDS) as (one, found):
        status, error = await one.error(path, **{**usual, **fields})
        assert (status, error["code"], error["param"]) == (400, code, param)
        assert words in error["message"]
        assert not found


@pytest.mark.parametrize("prefix", ["the", [5]])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_decoder_only_model_has_no_prefix(path: str, prefix: Any) -> None:
    usual = {"messages": MESSAGES} if path == CHAT else {"prompt": SOURCE}
    async with rig() as one:
        status, error = await one.error(path, **usual, decoder_prefix=prefix)
        assert (status, error["code"], error["param"]) == (400, "invalid_value", "decoder_prefix")
        assert "only encoder-decoder models have one" in error["message"]
        for absent in (None, "", []):
            assert (await one.post(path, **usual, decoder_prefix=absent, max_tokens=3)).status_code == 200


async def test_a_chat_without_a_template_is_refused_as_for_any_model() -> None:
    async with target_rig() as (one, _):
        status, error = await one.error(CHAT, messages=MESSAGES)
        assert (status, error["param"]) == (400, "messages")
        assert "no chat template" in error["message"]


async def test_text_with_a_token_that_the_model_has_no_row_for_is_refused() -> None:
    model = model_of("nllb")
    model = replace(model, vocab_size=FRENCH)
    async with rig(model=model, newest=served(model)) as one:
        status, error = await one.error(COMPLETIONS, prompt=[5], decoder_prefix="fra_Latn")
        assert (status, error["param"]) == (400, "decoder_prefix")
        assert f"'fra_Latn' with id {FRENCH}" in error["message"]


async def test_a_prefix_of_megabytes_is_refused_by_its_name() -> None:
    async with target_rig() as (one, _):
        status, error = await one.error(COMPLETIONS, prompt=[5], decoder_prefix="the " * 500_000)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "decoder_prefix")
        assert "However, your decoder_prefix has 2000000 bytes of text" in error["message"]
        assert error["message"].endswith("Please shorten decoder_prefix. (context_length_exceeded)")


@pytest.mark.parametrize(
    ("bounds", "source", "prefix", "limit"),
    [
        ({}, 10, 0, 89),
        ({}, 98, 0, 1),
        ({"target_positions": 30}, 10, 0, 29),
        ({"target_positions": 30}, 90, 0, 9),
        ({"target_positions": 30}, 10, 4, 25),
        ({"target_positions": 30}, 10, 28, 1),
        ({"source_positions": 40}, 40, 0, 59),
        ({"max_model_len": 1000}, 10, 0, SLOTS - 16 - 1),
        ({"max_model_len": 1000}, 17, 0, SLOTS - 32 - 1),
        ({"max_model_len": 1000}, 17, 5, SLOTS - 32 - 6),
        ({"max_model_len": 1000}, 140, 0, 15),
    ],
)
async def test_the_default_of_max_tokens_respects_every_bound(
    bounds: dict[str, int], source: int, prefix: int, limit: int
) -> None:
    """The source, and the target from its start token, have whole blocks of the group's slots each."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    async with target_rig(template=template, **bounds) as (one, found):
        await until(lambda: one.app.state.gateway.models.promised(one.app.state.gateway.models.current) is not None)
        for _ in range(2):
            content = "<extra_id_0>" * source
            await one.chat(messages=[{"role": "user", "content": content}], decoder_prefix=[5] * prefix)
        assert {len(request.prompt) for request in found} == {source}
        assert {request.max_new_tokens for request in found} == {limit}
        assert max(request.slots(BLOCK_TOKENS) for request in found) <= SLOTS


@given(slots=st.integers(1, 200), block=st.integers(1, 32), prompt=st.integers(1, 200), beginning=st.integers(1, 30))
def test_the_room_is_the_longest_output_whose_blocks_fit(slots: int, block: int, prompt: int, beginning: int) -> None:
    room = PromisedSlots(slots, block).room(prompt, beginning)

    def fits(new_tokens: int) -> bool:
        request = Request(
            parent="p", choice=0, revision="r", prompt=(1,) * prompt, max_new_tokens=new_tokens,
            sampling=SamplingParams(), decoder_prefix=(0,) * beginning,
        )  # fmt: skip
        return request.slots(block) <= slots

    assert not fits(max(room, 0) + 1)
    assert room < 1 or fits(room)


@pytest.mark.parametrize(
    ("fields", "need"),
    [
        ({"prompt": [5] * 160, "max_tokens": 5}, 160 + 16),
        ({"prompt": [5] * 145, "max_tokens": 5}, 160 + 16),
        ({"prompt": [5] * 160}, 160 + 16),
        ({"prompt": [5] * 16, "max_tokens": 144}, 16 + 160),
        ({"prompt": [5] * 16, "max_tokens": 140, "decoder_prefix": [5] * 4}, 16 + 160),
    ],
)
async def test_what_no_group_has_slots_for_never_fits(fields: dict[str, Any], need: int) -> None:
    async with target_rig(max_model_len=1000) as (one, found):
        status, error = await one.error(COMPLETIONS, **fields)
        assert (status, error["code"]) == (400, "never_fits")
        tokens = len(fields["prompt"]) + 1 + len(fields.get("decoder_prefix", ())) + fields.get("max_tokens", 1)
        assert (
            f"is {tokens_of_any_split(SLOTS, BLOCK_TOKENS)} tokens for source and target together" in error["message"]
        )
        assert f"{SLOTS} slots, in blocks of {BLOCK_TOKENS}" in error["message"]
        assert f"requested {tokens} tokens, which need {need} slots" in error["message"]
        fitting = await one.post(COMPLETIONS, prompt=[5] * 144, max_tokens=15)
        assert fitting.status_code == 200
        assert len(found) == 1


async def test_calls_that_differ_only_in_the_prefix_are_different_calls() -> None:
    async with target_rig("nllb") as (one, found):

        async def call(**body: Any) -> Any:
            return await one.client.post(
                COMPLETIONS, json={"prompt": SOURCE, "seed": 1, **body}, headers={"idempotency-key": "k"}
            )

        first = await call()
        for same in (None, "", []):
            assert (await call(decoder_prefix=same)).content == first.content
        status, error = error_of(await call(decoder_prefix="deu_Latn"))
        assert (status, error["code"]) == (422, "idempotency_key_reused")
        assert len(found) == 1


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_the_prefix_is_part_of_the_digest(kind: Any) -> None:
    usual = {"messages": MESSAGES} if kind is ChatBody else {"prompt": "a"}
    prefixes: list[Any] = [None, "a", "b", [1], [1, 2]]
    digests = {body_digest("/", kind(**usual, decoder_prefix=prefix)) for prefix in prefixes}
    assert len(digests) == len(prefixes)
    assert body_digest("/", kind(**usual)) in digests


@pytest.mark.parametrize(("prefix", "text"), [("deu_Latn", ANSWER), ("the", f" {ANSWER}")])
async def test_a_stream_is_resumed_and_its_result_counts_the_prefix(prefix: str, text: str) -> None:
    async with target_rig("nllb") as (one, _):
        body = {"prompt": SOURCE, "decoder_prefix": prefix, "n": 2}
        whole = await one.complete(**body)
        path = f"/v1/requests/{whole['id']}"
        assert (await one.client.get(f"{path}/result")).json() == whole
        assert whole["usage"]["prompt_tokens"] == len(source_of("nllb", SOURCE)) + len(ids_of("nllb", prefix))
        every = list(events((await one.client.get(f"{path}/events")).text))
        assert [choice["text"] for choice in (await one.client.get(path)).json()["choices"]] == [text] * 2
        for count in range(1, len(every)):
            seen = {int(name.split(".")[0]): name for name, _ in every[:count] if name and "." in name}
            last = ",".join(seen.get(choice, f"{choice}.start") for choice in range(2))
            rest = await one.client.get(f"{path}/events", headers={"last-event-id": last})
            texts = ["", ""]
            for name, data in [*every[:count], *events(rest.text)]:
                if data != "[DONE]" and name and "." in name:
                    texts[data["choices"][0]["index"]] += data["choices"][0]["text"]
            assert texts == [text, text]


@pytest.mark.parametrize("kind", ["t5", "bart", "nllb"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_pieces_of_a_stream_join_to_the_decoded_text(data: st.DataObject, kind: str) -> None:
    one = tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, one.vocab_size), max_size=20))
    request = Request(
        parent="p", choice=0, revision="r", prompt=(5,), max_new_tokens=30,
        sampling=SamplingParams(ignore_eos=True), decoder_prefix=(0, *ids_of(kind, "the")),
    )  # fmt: skip
    options = RenderOptions(kind=AnswerKind.COMPLETION, model="m", created=0, prefix_tokens=1)
    stream = ChoiceStream(request, options, RenderModel(one, frozenset()))
    texts = [next(iter(events(stream.token(Token(token_id)))))[1]["choices"][0]["text"] for token_id in ids]
    assert one._inner.decode([*ids_of(kind, "the"), *ids]).startswith("the" + "".join(texts))


async def test_a_stop_string_ends_the_target() -> None:
    async with target_rig() as (one, _):
        choice = (await one.complete(prompt=SOURCE, stop=" lazy"))["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the", "stop", " lazy")
        choice = (await one.complete(prompt=SOURCE, stop="the"))["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("", "the")


async def test_offsets_of_log_probabilities_are_those_of_the_text() -> None:
    async with target_rig() as (one, _):
        choice = (await one.complete(prompt=SOURCE, logprobs=1))["choices"][0]
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        assert offsets[0] == 0
        for token, offset in list(zip(tokens, offsets, strict=True))[1:-1]:
            assert choice["text"].startswith(token, offset)
        choice = (await one.complete(prompt=SOURCE, logprobs=1, decoder_prefix="the"))["choices"][0]
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        for token, offset in list(zip(tokens, offsets, strict=True))[:-1]:
            assert choice["text"].startswith(token, offset), "its first token keeps its space"


async def test_clients_learn_the_kind_of_the_model_and_its_bounds() -> None:
    async with target_rig(has_template=True, **BOUNDS) as (one, _):
        card = (await one.client.get("/v1/models")).json()["data"][0]
        assert (card["max_model_len"], card["max_source_len"], card["max_target_len"]) == (60, 40, 30)
        assert card["is_encoder_decoder"] is True
        ready = (await one.client.get("/ready")).json()
        assert (ready["is_encoder_decoder"], ready["has_chat_template"]) == (True, True)
        await until(lambda: one.app.state.gateway.models.has_formed)
        assert (await one.client.get("/ready")).json()["max_total_tokens"] == 60, "no more than the model's length"
    async with target_rig(max_model_len=1000) as (one, _):
        await until(lambda: one.app.state.gateway.models.has_formed)
        longest = (await one.client.get("/ready")).json()["max_total_tokens"]
        assert longest == tokens_of_any_split(SLOTS, BLOCK_TOKENS) < SLOTS
        assert (await one.post("/tokenize", prompt=SOURCE)).json()["tokens"] == list(source_of("t5", SOURCE))
    async with target_rig() as (one, _):
        card = (await one.client.get("/v1/models")).json()["data"][0]
        assert (card["max_source_len"], card["max_target_len"]) == (None, None)
        assert (await one.client.get("/ready")).json()["has_chat_template"] is False
    async with rig(schedules=False) as one:
        card = (await one.client.get("/v1/models")).json()["data"][0]
        assert (card["is_encoder_decoder"], card["max_source_len"]) == (False, None)


async def counted(one: Rig) -> dict[str, float]:
    families = text_string_to_metric_families((await one.client.get("/metrics")).text)
    return {sample.name: sample.value for family in families for sample in family.samples}


async def test_metrics_count_source_and_target_tokens_separately() -> None:
    async with target_rig("nllb") as (one, _):
        await one.complete(prompt=SOURCE, n=2, decoder_prefix="deu_Latn")
        await until(lambda: one.app.state.gateway.metrics.open_connections._value.get() == 0)
        values = await counted(one)
        source, answer = len(source_of("nllb", SOURCE)), len(ids_of("nllb", ANSWER)) + 1
        assert values["orca_source_tokens_total"] == 2 * source
        assert values["orca_target_tokens_total"] == 2 * (2 + answer)
        assert values["orca_generation_tokens_total"] == 2 * answer
        assert values["orca_prompt_tokens_total"] == values["orca_request_prompt_tokens_sum"] == 2 * (source + 1)
    async with rig() as one:
        await one.complete()
        values = await counted(one)
        assert values["orca_source_tokens_total"] == values["orca_target_tokens_total"] == 0


async def test_ids_of_a_prefix_are_not_run_by_the_next_model() -> None:
    old, new = model_of("nllb"), replace(model_of("nllb", revision="r2"), name="newer")
    async with rig(model=old, newest=served(old), others=[served(new)], schedules=True) as one:
        one.scheduler.answer = lambda _: (5,)
        await one.pool.promise_slots("r2", SLOTS)
        await one.pool.set_revision("r2", 1)
        other = FakeScheduler(one.pool, "r2", "other", answer=lambda _: (5,))
        task = asyncio.create_task(other.run())
        body: dict[str, Any] = {"prompt": SOURCE, "model": old.name}
        status, error = await one.error(COMPLETIONS, **body, decoder_prefix=[5])
        assert (status, error["code"], error["param"]) == (409, "model_replaced", "decoder_prefix")
        assert (await one.post(COMPLETIONS, **body, decoder_prefix="the", max_tokens=1)).status_code == 200
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_the_rendering_of_other_calls_is_stored_as_before() -> None:
    options = RenderOptions(kind=AnswerKind.COMPLETION, model="m", created=0)
    assert "prefix_tokens" not in options.to_json()
    assert RenderOptions.from_json(options.to_json()) == options
    options = replace(options, prefix_tokens=3)
    assert RenderOptions.from_json(options.to_json()) == options


async def test_a_folder_decides_how_answers_begin(tmp_path: Path) -> None:
    """Gateway and scheduler read the same folder, so that both write the same text."""
    write_folder(tmp_path, unigram(), {"tokenizer_class": "T5Tokenizer", "extra_ids": 2}, model_type="t5")
    config = {"model_type": "t5", "vocab_size": 400, "num_layers": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    header = orjson.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    newest = load_newest(GatewaySettings(model=str(tmp_path)))
    answer = newest.tokenizer.encode(ANSWER)

    def scheduler(pool: Any) -> FakeScheduler:
        own = Tokenizer.from_folder(tmp_path)
        return FakeScheduler(
            pool, newest.info.revision, answer=lambda _: answer, tokenizer=own, eos_ids=newest.info.eos_token_ids
        )

    async with rig(model=newest.info, newest=newest, make_scheduler=scheduler) as one:
        choice = (await one.complete(prompt=SOURCE))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (ANSWER, "stop")
        assert (await one.complete(prompt=SOURCE, stop="the"))["choices"][0]["text"] == ""
