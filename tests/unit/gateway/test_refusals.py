"""Every way to be refused: status, named field, OpenAI's shape, and nothing left in the pool."""

import json
from typing import Any

import pytest

from orca.core.domain.request import Request
from support.gateway.gateway_rig import MODEL, error_of, ids, recording, rig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "hi"}]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [MODEL.vocab_size]}, "prompt"),
    ({"prompt": [[1], [2**63]]}, "prompt[1]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": "a", "model": 5}, "model"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 129}, "n"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "n": 3, "best_of": 1}, "best_of"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 2.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "max_tokens": 2.0**64}, "max_tokens"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [5, 5.0]}, "prompt"),
    ({"prompt": "a", "n": 1.5}, "n"),
    ({"prompt": "a", "stop_token_ids": [1, 1.5]}, "stop_token_ids[1]"),
    ({"prompt": "a", "top_p": -0.1}, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 1.1}, "min_p"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -2.1}, "frequency_penalty"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"²": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(MODEL.vocab_size): 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"prompt": "a", "seed": 2**63}, "seed"),
    ({"prompt": "a", "seed": 1.5}, "seed"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "stop": [5]}, "stop"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "stop": "x" * 1025}, "stop"),
    ({"prompt": "a", "stop_token_ids": [MODEL.vocab_size]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": ["1"]}, "stop_token_ids[0]"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "deadline_ms": 0}, "deadline_ms"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prompt": "a", "stream_options": {}}, "stream_options"),
    ({"prompt": "a", "stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
async def test_a_bad_field_of_a_completion_is_named(body: dict[str, Any], param: str) -> None:
    async with rig(schedules=False) as one:
        status, error = await one.error(COMPLETIONS, **body)
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert param.partition("[")[0].split(".")[-1] in error["message"]
        assert (await one.pool.stats()).queued == 0


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "wizard", "content": "hi"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [*USER, {"role": "user", "content": None}]}, "messages[1].content"),
    ({"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
    ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[1].tool_calls[0]"),
    ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "logprobs": 1}, "logprobs"),
    ({"messages": USER, "chat_template_kwargs": []}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
async def test_a_bad_field_of_a_chat_is_named(body: dict[str, Any], param: str) -> None:
    async with rig(schedules=False) as one:
        status, error = await one.error(CHAT, **body)
        assert (status, error["param"]) == (400, param)


UNBUILT: list[tuple[str, str, Any]] = [
    (CHAT, "function_call", {"name": "f"}),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "function_call", {"name": "f"}),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "audio", {"voice": "a"}),
    (CHAT, "chat_template", "{{ x }}"),
    (COMPLETIONS, "suffix", "end"),
    (COMPLETIONS, "guided_json", {}),
    (COMPLETIONS, "guided_choice", ["a"]),
    (COMPLETIONS, "prompt_embeds", "abc"),
    (COMPLETIONS, "use_beam_search", True),
    (COMPLETIONS, "length_penalty", True),
    (COMPLETIONS, "truncate_prompt_tokens", 5),
    (COMPLETIONS, "regex", "a+"),
    (COMPLETIONS, "ebnf", "root ::= 'a'"),
    (COMPLETIONS, "json_schema", "{}"),
    (COMPLETIONS, "grammar", "root ::= 'a'"),
    (COMPLETIONS, "nvext", {"guided_json": {}}),
    (COMPLETIONS, "num_beams", 4),
    (COMPLETIONS, "max_new_tokens", 5),
    (COMPLETIONS, "no_repeat_ngram_size", 2),
    (COMPLETIONS, "typical_p", 0.5),
    (COMPLETIONS, "mirostat", 2),
    (COMPLETIONS, "lora_path", "a"),
    (CHAT, "best_of", 2),
    (CHAT, "suffix", "end"),
    (CHAT, "response_schema", {}),
    (COMPLETIONS, "num_beam_groups", 2),
    (COMPLETIONS, "diversity_penalty", 0.5),
    (COMPLETIONS, "num_return_sequences", 2),
    (COMPLETIONS, "beam_size", 4),
    (COMPLETIONS, "beam_search", True),
    (COMPLETIONS, "n_beams", 4),
    (COMPLETIONS, "beamWidth", 4),
    (COMPLETIONS, "beam_search_diversity_rate", 0.5),
    (COMPLETIONS, "bad_words_ids", [[5]]),
    (COMPLETIONS, "suppress_tokens", [5]),
    (COMPLETIONS, "begin_suppress_tokens", [5]),
    (COMPLETIONS, "min_length", 5),
    (COMPLETIONS, "forced_bos_token_id", 5),
    (COMPLETIONS, "forced_eos_token_id", 0),
    (COMPLETIONS, "decoder_input_ids", [[5]]),
    (COMPLETIONS, "decoder_start_token_id", 5),
    (COMPLETIONS, "encoder_no_repeat_ngram_size", 2),
    (COMPLETIONS, "encoder_repetition_penalty", 1.5),
    (COMPLETIONS, "src_lang", "en"),
    (CHAT, "tgt_lang", "de"),
    (CHAT, "generation_config", {"num_beams": 4}),
    (CHAT, "stop_strings", ["a"]),
    (COMPLETIONS, "logprob_token_ids", [5]),
    (COMPLETIONS, "prompt_logprob_token_ids", [5]),
    (COMPLETIONS, "prompt_logprob_start", 1),
    (COMPLETIONS, "trace_decode_token_ids", [5]),
    (COMPLETIONS, "detokenize", False),
    (COMPLETIONS, "flat_logprobs", True),
    (CHAT, "include_reasoning", False),
    (CHAT, "separate_reasoning", False),
]
INSTEAD = {"tgt_lang", "decoder_input_ids", "forced_bos_token_id"}


@pytest.mark.parametrize(("path", "name", "value"), UNBUILT, ids=lambda value: str(value)[:40])
async def test_an_unsupported_field_that_changes_the_answer_is_refused_by_name(
    path: str, name: str, value: Any
) -> None:
    async with rig(schedules=False) as one:
        status, error = await one.error(path, **{"prompt": "a", "messages": USER, name: value})
        assert (status, error["param"], error["code"]) == (400, name, "unsupported_parameter")
        message, _, instead = error["message"].partition(
            " Use " if "function" in name else " For an encoder-decoder model, "
        )
        assert message == f"Unsupported parameter: '{name}' is not supported with this model."
        assert ("decoder_prefix" in instead) == (name in INSTEAD)


@pytest.mark.parametrize(
    ("path", "name", "value", "instead"),
    [
        (COMPLETIONS, "tools", [{"type": "function", "function": {"name": "f"}}], "Use /v1/chat/completions."),
        (COMPLETIONS, "tool_choice", "required", "Use /v1/chat/completions."),
        (COMPLETIONS, "continue_final_message", True, "A completion continues its prompt."),
        (COMPLETIONS, "max_completion_tokens", 5, "Use max_tokens."),
        (COMPLETIONS, "top_logprobs", 5, "Use logprobs."),
    ],
)
async def test_a_field_of_the_other_call_is_refused_by_name(path: str, name: str, value: Any, instead: str) -> None:
    given = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    async with rig(schedules=False) as one:
        status, error = await one.error(path, **given, **{name: value})
    assert (status, error["param"]) == (400, name)
    assert error["message"].endswith(instead)


async def test_tools_are_named_before_the_tool_choice_that_an_sdk_added() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with rig(schedules=False) as one:
        _, error = await one.error(CHAT, tool_choice="required", tools=[tool], messages=USER)
        assert error["param"] == "tools"
        _, error = await one.error(CHAT, function_call={"name": "f"}, functions=[tool["function"]], messages=USER)
        assert error["param"] == "functions"


async def test_neutral_values_and_unknown_fields_are_accepted() -> None:
    common = {
        "response_format": {"type": "text"}, "logit_bias": None, "best_of": None, "user": "me", "seed": None,
        "stop": None, "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "priority": 0,
        "guided_json": None, "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "top_k": -1, "n": 1,
        "temperature": None, "top_p": None, "max_tokens": None, "stream": None, "stream_options": None, "x": [1],
        "return_token_ids": None, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "min_tokens": 1,
        "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "num_return_sequences": 1, "beam_search": False,
        "beam_size": 1, "bad_words_ids": [], "suppress_tokens": None, "min_length": 0, "forced_eos_token_id": None,
        "encoder_repetition_penalty": 1.0, "src_lang": None, "tgt_lang": "", "generation_config": {"num_beams": None},
        "early_stopping": False, "no_repeat_ngram_size": 0, "typical_p": 1.0, "decoder_input_ids": None,
        "prediction": None, "safety_identifier": "a", "prompt_cache_key": "a", "extra_body": {},
    }  # fmt: skip
    chat = {"tools": None, "tool_choice": "none", "modalities": ["text"], "parallel_tool_calls": True, "echo": False}
    chat |= {"reasoning_effort": "none", "tools": [], "functions": [], "audio": None, "web_search_options": None}
    chat |= {"response_format": {"type": "text", "json_schema": None}, "thinking": {"type": "disabled", "budget": None}}
    async with rig() as one:
        await one.complete(**common | {"best_of": 1, "suffix": None, "max_tokens": 5})
        await one.chat(**common | chat)


async def test_a_bound_that_repeats_max_tokens_is_accepted() -> None:
    """Older versions of GuideLLM send both bounds to each route."""
    asked: list[Request] = []
    async with rig() as one:
        one.scheduler.answer = recording(asked)
        for bound in (3, 3.0):
            await one.complete(max_tokens=3, max_completion_tokens=bound)
        for bad in ({"max_tokens": 3, "max_completion_tokens": 4}, {"max_tokens": 1, "max_completion_tokens": True}):
            status, error = await one.error(COMPLETIONS, prompt="a", **bad)
            assert (status, error["param"]) == (400, "max_completion_tokens")
    assert [request.max_new_tokens for request in asked] == [3, 3]


async def test_an_unknown_model_is_404() -> None:
    async with rig() as one:
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            body = {"prompt": "a", "messages": USER, "tokens": [1], "model": "huge"}
            status, error = await one.error(path, **body)
            assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
            assert error["message"] == "The model `huge` does not exist. This server has `tiny`."


async def test_tokens_beyond_the_context_name_both_numbers() -> None:
    async with rig() as one:
        status, error = await one.error(COMPLETIONS, prompt="the fox", max_tokens=500)
        assert (status, error["param"], error["code"]) == (400, "max_tokens", "context_length_exceeded")
        length = len(ids("the fox"))
        assert error["message"] == (
            f"This model's maximum context length is {MODEL.max_model_len} tokens. However, you requested "
            f"{length + 500} tokens ({length} in the messages, 500 in the completion). Please reduce the length of the "
            "messages or completion. (context_length_exceeded)"
        )


async def test_a_prompt_as_long_as_the_context_is_refused_even_without_max_tokens() -> None:
    async with rig() as one:
        status, error = await one.error(COMPLETIONS, prompt=[5] * MODEL.max_model_len)
        assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
        assert error["message"] == (
            "This model's maximum context length is 200 tokens. However, you requested 201 tokens (200 in the "
            "messages, 1 in the completion). Please reduce the length of the messages or completion. "
            "(context_length_exceeded)"
        )
        _, error = await one.error(COMPLETIONS, prompt=[5] * (MODEL.max_model_len + 1))
        assert error["message"] == (
            "This model's maximum context length is 200 tokens. However, your messages resulted in 201 tokens. "
            "Please reduce the length of the messages. (context_length_exceeded)"
        )


TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "fox " * 300}),
    (COMPLETIONS, {"prompt": "fox " * 300, "max_tokens": 4}),
    (COMPLETIONS, {"prompt": "x" * 100_000}),
    (COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 4}),
    (COMPLETIONS, {"prompt": ["a", [5] * 300]}),
    (COMPLETIONS, {"prompt": [5] * 100, "max_tokens": 90}),  # never fits the slots
    (CHAT, {"messages": [{"role": "user", "content": "fox " * 300}]}),
    (CHAT, {"messages": USER, "max_completion_tokens": 4000}),
]


@pytest.mark.parametrize(("path", "body"), TOO_LONG, ids=lambda value: str(value)[:60])
async def test_clients_recognize_that_a_prompt_is_too_long(path: str, body: dict[str, Any]) -> None:
    """LiteLLM looks for the first words in the message, LangChain for the code, OpenHands for the last words."""
    async with rig() as one:
        status, error = await one.error(path, **body)
        assert status == 400
        for words in (
            "This model's maximum context length is ",
            "context_length_exceeded",
            "Please reduce the length of",
        ):
            assert words in error["message"]


async def test_a_request_that_could_never_fit_the_slots_is_refused() -> None:
    async with rig() as one:
        await one.complete(max_tokens=2)
        status, error = await one.error(COMPLETIONS, prompt=[5] * 100, max_tokens=90)
        assert (status, error["code"]) == (400, "never_fits")
        assert "190" in error["message"]
        assert "160" in error["message"]


async def test_unknown_routes_and_methods_answer_in_the_same_shape() -> None:
    async with rig(schedules=False) as one:
        status, error = error_of(await one.client.post("/v1/embeddings", json={"input": "a"}))
        assert status == 404
        assert error["message"] == "POST /v1/embeddings: Not Found; /openapi.json lists the paths that this server has"
        response = await one.client.get(COMPLETIONS)
        assert error_of(response)[0] == 405
        assert response.headers["allow"] == "POST"


async def test_a_model_without_chat_template_refuses_chats() -> None:
    async with rig(schedules=False, chat_template=None) as one:
        status, error = await one.error(CHAT, messages=USER)
        assert (status, error["param"]) == (400, "messages")
        assert "/v1/completions" in error["message"]


async def test_messages_that_the_template_refuses_are_400_with_its_message() -> None:
    async with rig(schedules=False, chat_template="{{ raise_exception('roles must alternate') }}") as one:
        status, error = await one.error(CHAT, messages=USER)
        assert (status, error["param"]) == (400, "messages")
        assert "roles must alternate" in error["message"]


SENTENCES: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**30}, "max_tokens: is too large a number"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens: must be a whole number, not 1.5"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens: must be at least 1 unless echo is true"),
    (COMPLETIONS, {"prompt": "a", "top_p": -1}, "top_p: must be at least 0, not -1"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**63}, f"seed: must be at most {2**63 - 1}, not {2**63}"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream: must be true or false, not 'yes'"),
    (COMPLETIONS, {"prompt": "a", "stream_options": 5}, "stream_options: must be an object, not 5"),
    (COMPLETIONS, {"prompt": "a", "n": 1000}, "n: 1000 choices are more than 128 choices of one call"),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 100}, "n: 2 prompts with n = 100 are more than 128 choices of one call"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt: must be text or token ids, or a list of either, not an object"),
    (COMPLETIONS, {"prompt": []}, "prompt: must be text or token ids, or a list of either, not an empty list"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1]: must be text or a list of token ids, not 5"),
    (COMPLETIONS, {"prompt": [1, 9999]}, f"prompt: 9999 is not a token id of this model (0 to {MODEL.vocab_size - 1})"),
    (COMPLETIONS, {"prompt": [1, "b"]}, f"prompt: 'b' is not a token id of this model (0 to {MODEL.vocab_size - 1})"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x", 5]}, "stop: must be text or a list of texts; it has 5"),
    (COMPLETIONS, {"prompt": "a", "stop": "x" * 2000}, "stop: a text must have 1 to 1024 characters, not 2000"),
    (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"5": 200}},
        "logit_bias: the bias of 5 must be between -100 and 100, not 200",
    ),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of: only n, which is 1, is supported, not 3"),
    (CHAT, {}, "messages: is required"),
    (CHAT, {"messages": []}, "messages: must not be empty"),
    (CHAT, {"messages": "hi"}, "messages: must be a list, not 'hi'"),
    (CHAT, {"messages": ["hi"]}, "messages[0]: must be an object, not 'hi'"),
    (
        CHAT,
        {"messages": [*USER, {"role": "wizard", "content": "hi"}]},
        "messages[1].role: must be 'system', 'developer', 'user', 'assistant', 'tool' or 'function', not 'wizard'",
    ),
    (CHAT, {"messages": USER, "n": 1000}, "n: 1000 choices are more than 128 choices of one call"),
    (CHAT, {"messages": USER, "audio": {}}, "Unsupported parameter: 'audio' is not supported with this model."),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs: needs logprobs to be true"),
]


@pytest.mark.parametrize(("path", "body", "sentence"), SENTENCES, ids=[sentence for _, _, sentence in SENTENCES])
async def test_refusals_use_the_terms_of_json_and_not_of_python(path: str, body: dict[str, Any], sentence: str) -> None:
    async with rig(schedules=False) as one:
        status, error = error_of(await one.client.post(path, content=json.dumps(body), headers=JSON))
        assert (status, error["message"]) == (400, sentence)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "tools": [{"type": "web_search"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ],
    ids=["tools", "image"],
)
async def test_what_only_other_servers_have_has_a_code_of_its_own(path: str, body: dict[str, Any]) -> None:
    async with rig(schedules=False) as one:
        status, error = error_of(await one.post(path, **body))
        assert (status, error["code"]) == (400, "unsupported_parameter")


async def test_a_part_of_a_message_whose_type_is_no_text_is_refused() -> None:
    async with rig(schedules=False) as one:
        part = {"type": 5, "text": "hi"}
        _, error = await one.error(CHAT, messages=[{"role": "user", "content": [part]}])
        assert error["message"] == "messages[0].content[0]: must be an object with a type and a text"
