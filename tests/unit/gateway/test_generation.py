"""Answers of successful calls, through the whole gateway, with a scheduler that answers by script."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orca.core.domain.errors import PoolUnavailable
from orca.core.domain.request import FinishReason, Request, SamplingParams
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import MODEL, SLOTS, WORDS, Rig, eos, events, ids, recording, rig, tokenizer, until

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


async def streamed(one: Rig, path: str = "/v1/completions", headers: Any = None, **body: Any) -> list[tuple[Any, Any]]:
    body = {
        "prompt": "the fox",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 50,
        "stream": True,
    } | body
    response = await one.client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return list(events(response.text))


async def test_a_completion_has_text_finish_reason_and_usage() -> None:
    async with rig() as one:
        answer = await one.complete()
        tokens = len(ids(WORDS))
        assert answer["object"] == "text_completion"
        assert answer["model"] == "tiny"
        assert answer["choices"] == [
            {"index": 0, "text": WORDS, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ]
        prompt = len(ids("the fox"))
        assert answer["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }


async def test_a_chat_goes_through_the_template() -> None:
    async with rig() as one:
        found: list[Request] = []
        one.scheduler.answer = recording(found, " yes<|end|>")
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        answer = await one.chat(messages=[{"role": "system", "content": "be"}, {"role": "user", "content": parts}])
        prompt = tokenizer().decode(found[0].prompt, skip_special_tokens=False)
        assert prompt == "<|user|>system: be\n<|user|>user: a\nb\nassistant:"
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": " yes", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_every_role_that_openai_knows_reaches_the_template() -> None:
    """A developer is the system under this template, which writes any role."""
    async with rig(schedules=False) as one:
        roles = ["system", "developer", "user", "assistant", "tool", "function"]
        found = (await one.post("/tokenize", messages=[{"role": role, "content": "x"} for role in roles])).json()
        prompt = tokenizer().decode(found["tokens"], skip_special_tokens=False)
        roles[1] = "system"
        assert prompt == "".join(f"<|user|>{role}: x\n" for role in roles) + "assistant:"


async def test_a_completion_streams() -> None:
    async with rig() as one:
        found = await streamed(one, **STREAM)
        *chunks, usage, done = [data for _, data in found]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == WORDS
        assert len(chunks) == len(ids(WORDS)) + 1
        assert all(chunk["usage"] is None for chunk in chunks)
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(ids(WORDS)))
        assert done == "[DONE]"


async def test_a_chat_streams() -> None:
    async with rig() as one:
        *chunks, done = [data for _, data in await streamed(one, "/v1/chat/completions")]
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == WORDS
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert done == "[DONE]"


async def test_continuous_usage_counts_up_with_each_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with rig() as one:
        *chunks, usage, _ = [data for _, data in await streamed(one, stream_options=options)]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == [*range(1, len(ids(WORDS)) + 1), len(ids(WORDS))]
        assert usage["usage"]["completion_tokens"] == counts[-1]


async def test_event_ids_are_sent_to_clients_that_accept_event_streams() -> None:
    async with rig() as one:
        found = await streamed(one, headers={"accept": "application/json, text/event-stream"}, n=2)
        tokens = len(ids(WORDS))
        for choice in range(2):
            own = [event_id for event_id, _ in found if event_id.startswith(f"{choice}.")]
            assert own == [*(f"{choice}.{i}" for i in range(tokens)), f"{choice}.end"]
        assert found[-1] == ("end", "[DONE]")


async def test_lists_of_prompts_and_n_give_choices_in_order() -> None:
    async with rig() as one:
        one.scheduler.answer = lambda request: (*request.prompt[-1:], *ids(str(request.choice)))
        answer = await one.complete(prompt=[[5, 70], [5, 71], [5, 72]], n=2)
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [tokenizer().token_text(70 + i // 2) + str(i) for i in range(6)]
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"]["prompt_tokens"] == 6


async def test_each_prompt_of_a_list_gets_the_seeds_that_it_would_get_alone() -> None:
    found: list[Request] = []
    async with rig() as one:
        one.scheduler.answer = recording(found)
        await one.complete(prompt=["a", "b"], n=2, seed=-1)
        await one.complete(prompt="b", n=2, seed=-1)
    top = 2**63 - 1
    seeds = [(request.choice, request.sampling.seed) for request in found]
    assert seeds == [(0, top), (1, 0), (2, top), (3, 0), (0, top), (1, 0)]


async def test_the_choices_of_a_prompt_share_its_ids_which_may_be_many() -> None:
    found: list[Request] = []
    async with rig() as one:
        one.scheduler.answer = recording(found)
        await one.complete(prompt=["the fox", "the dog"], n=3)
    assert len({id(request.prompt) for request in found}) == 2


async def test_seeds_are_drawn_when_none_is_given() -> None:
    found: list[Request] = []
    async with rig() as one:
        one.scheduler.answer = recording(found)
        for _ in range(3):
            await one.complete()
    assert len({request.sampling.seed for request in found}) == 3


async def test_sampling_fields_reach_the_request() -> None:
    found: list[Request] = []
    body = {
        "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {"7": -100, "3": 2}, "seed": 9, "logprobs": 2, "min_tokens": 1,
        "ignore_eos": True, "stop_token_ids": [7], "stop": ["x", "y", "x"], "echo": True,
    }  # fmt: skip
    async with rig() as one:
        one.scheduler.answer = recording(found)
        await one.complete(**body)
    assert found[0].sampling == SamplingParams(
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias=((3, 2.0), (7, -100.0)),
        seed=9,
        logprobs=2,
        prompt_logprobs=2,
        min_tokens=1,
        ignore_eos=True,
        stop_token_ids=(7,),
        stop=("x", "y"),
    )


async def test_missing_sampling_fields_are_openais_defaults() -> None:
    found: list[Request] = []
    async with rig() as one:
        one.scheduler.answer = recording(found)
        await one.post("/v1/completions", prompt="the fox")
    assert found[0].max_new_tokens == 16
    assert replace(found[0].sampling, seed=0) == SamplingParams()


async def test_a_missing_max_tokens_is_cut_to_the_slots_that_the_engine_has() -> None:
    found: list[Request] = []
    async with rig() as one:
        one.scheduler.answer = recording(found)
        await one.chat()
        await one.post("/v1/completions", prompt=[5] * (SLOTS - 2))
    assert [request.max_total_tokens for request in found] == [SLOTS, SLOTS]


async def test_a_missing_max_tokens_is_cut_to_a_promise_that_just_changed() -> None:
    found: list[Request] = []
    async with rig() as one:
        one.scheduler.answer = recording(found)
        await one.chat()
        assert await one.pool.set_promise(MODEL.revision, SLOTS // 2, expected=SLOTS) == SLOTS // 2
        await one.chat()
        status, error = await one.error("/v1/completions", prompt="a", max_tokens=SLOTS // 2)
    assert [request.max_total_tokens for request in found] == [SLOTS, SLOTS // 2]
    assert (status, error["code"]) == (400, "never_fits")


async def test_a_missing_max_tokens_is_cut_to_the_context_before_a_group_has_formed() -> None:
    async with rig(schedules=False) as one:
        post = asyncio.create_task(one.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]))
        await until(lambda: one.pool.state.records)
        (record,) = one.pool.state.records.values()
        assert record.request.max_total_tokens == MODEL.max_model_len
        await one.pool.cancel(record.request.parent)
        assert (await post).status_code == 409


async def test_max_completion_tokens_overrides_max_tokens() -> None:
    found: list[Request] = []
    async with rig(settings=GatewaySettings(model="tiny", default_max_new_tokens=7)) as one:
        one.scheduler.answer = recording(found)
        await one.chat()
        await one.chat(max_tokens=3)
        await one.chat(max_tokens=3, max_completion_tokens=4)
    assert [request.max_new_tokens for request in found] == [7, 3, 4]


async def test_a_deadline_ends_the_request() -> None:
    async with rig(settings=GatewaySettings(model="tiny", round_seconds=0.05)) as one:
        one.scheduler.turns_left = 1
        response = await one.post("/v1/completions", prompt="a", max_tokens=9, deadline_ms=100)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.MODEL_REPLACED, 503)])
async def test_a_request_that_the_pool_ends_is_an_error_of_a_whole_answer(reason: FinishReason, status: int) -> None:
    async with rig() as one:
        one.scheduler.reason = reason
        response = await one.post("/v1/completions", prompt="a")
        assert response.status_code == status
        assert response.headers["x-request-id"].startswith("cmpl-")


async def test_a_failing_stream_ends_in_an_error_event_without_done() -> None:
    async with rig() as one:
        one.scheduler.reason = FinishReason.ERROR
        *chunks, (_, last) = await streamed(one)
        assert "".join(data["choices"][0]["text"] for _, data in chunks) == WORDS
        assert last["error"]["code"] == "failed"


async def test_a_stream_whose_record_is_lost_fails_instead_of_waiting_for_ever() -> None:
    async with rig() as one:
        one.scheduler.turns_left = 1
        streaming = asyncio.create_task(streamed(one))
        await until(lambda: any(record.log for record in one.pool.state.records.values()))
        one.pool.state.records.clear()
        *_, (_, last) = await asyncio.wait_for(streaming, 20)
        assert last["error"]["code"] == "unknown_request"


async def test_running_streams_survive_an_outage_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as one:
        read_many, fails = one.pool.read_many, iter(range(3))

        async def shaky(*args: Any, **kwargs: Any) -> Any:
            if next(fails, None) is not None:
                raise PoolUnavailable("away")
            return await read_many(*args, **kwargs)

        monkeypatch.setattr(one.pool, "read_many", shaky)
        assert (await one.complete())["choices"][0]["text"] == WORDS


async def test_a_submit_whose_answer_was_lost_is_repeated_under_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as one:
        submit, names = one.pool.submit, []

        async def lossy(submission: Any) -> Any:
            names.append(submission.parent)
            answer = await submit(submission)
            if len(names) == 1:
                raise PoolUnavailable("reply lost")
            return answer

        monkeypatch.setattr(one.pool, "submit", lossy)
        await one.complete()
        assert names[0] == names[1]
        assert (await one.pool.stats()).ended == 1


async def test_eos_ends_with_stop_and_stop_strings_are_not_sent() -> None:
    async with rig() as one:
        one.scheduler.answer = lambda _: (*ids("one two"), eos())
        assert (await one.complete())["choices"][0]["finish_reason"] == "stop"
        choice = (await one.complete(stop=["e t", "zzz"]))["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("on", "e t")


@pytest.mark.parametrize("stop", ["<|user|>", "o<|user|>", "<|user|> and"])
async def test_a_special_token_in_a_stop_string_ends_the_output(stop: str) -> None:
    async with rig() as one:
        one.scheduler.answer = lambda _: ids(" Hello<|user|> and more")
        choice = (await one.complete(stop=[stop, "more"]))["choices"][0]
        shown = " Hell" if stop.startswith("o") else " Hello"
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", stop)
        chunks = [data["choices"][0] for _, data in (await streamed(one, stop=[stop, "more"]))[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) == shown
        assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", stop)


async def test_the_call_id_is_the_answers_id_and_a_header() -> None:
    async with rig() as one:
        response = await one.post("/v1/completions", prompt="a")
        assert response.json()["id"] == response.headers["x-request-id"]
        assert response.headers["x-request-id"].startswith("cmpl-")


async def test_a_trace_context_is_passed_on_with_the_requests() -> None:
    found: list[Request] = []
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with rig() as one:
        one.scheduler.answer = recording(found)
        for given in (context, "nonsense"):
            await one.client.post("/v1/completions", json={"prompt": "a"}, headers={"traceparent": given})
    assert [request.traceparent for request in found] == [context, None]


async def test_long_texts_are_encoded_off_the_event_loop() -> None:
    async with rig(settings=GatewaySettings(model="tiny", inline_characters_max=0)) as one:
        assert (await one.complete())["choices"][0]["text"] == WORDS


async def test_many_calls_at_once_each_get_their_own_answer() -> None:
    async with rig() as one:
        one.scheduler.answer = lambda request: request.prompt
        answers = await asyncio.gather(*(one.complete(prompt=f"number {i}", max_tokens=20) for i in range(50)))
        assert [answer["choices"][0]["text"] for answer in answers] == [f"number {i}" for i in range(50)]


async def test_reader_entries_are_no_longer_renewed_when_answers_are_complete() -> None:
    """Nobody waits for them to go: they lapse long before the pool forgets an ended request."""
    async with rig() as one:
        await one.complete()
        await until(lambda: not one.app.state.gateway.readers._open)


@pytest.mark.parametrize("n", [1, 2])
async def test_max_tokens_0_with_echo_scores_only_the_prompt(n: int) -> None:
    async with rig() as one:
        answer = await one.complete(max_tokens=0, echo=True, logprobs=1, n=n, return_token_ids=True)
        for choice in answer["choices"]:
            assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("the fox", "length", [])
            assert len(choice["logprobs"]["token_logprobs"]) == len(ids("the fox"))
        length = len(ids("the fox"))
        assert answer["usage"] == {"prompt_tokens": length, "completion_tokens": 0, "total_tokens": length}


async def test_max_tokens_0_streams_and_ends_by_length_even_if_the_model_would_stop() -> None:
    async with rig() as one:
        one.scheduler.answer = lambda _: (eos(),)
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": "the fox", "max_tokens": 0, "echo": True, "stream": True, "stream_options": options}
        *chunks, usage, _ = [data for _, data in events((await one.post("/v1/completions", **body)).text)]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the fox"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert {chunk["usage"]["completion_tokens"] for chunk in (*chunks, usage)} == {0}


@pytest.mark.parametrize("top_k", [-1, 0, MODEL.vocab_size, 2**63])
async def test_a_top_k_that_cuts_nothing_means_no_top_k(top_k: int) -> None:
    async with rig() as one:
        found: list[Request] = []
        one.scheduler.answer = recording(found)
        await one.complete(top_k=top_k)
        assert found[0].sampling.top_k is None


@pytest.mark.parametrize("top_p", [0, 0.0, 1e-300, 1 / MODEL.vocab_size])
async def test_a_top_p_that_keeps_one_token_is_greedy(top_p: float) -> None:
    async with rig() as one:
        found: list[Request] = []
        one.scheduler.answer = recording(found)
        for temperature in (None, 0, 1):
            await one.complete(top_p=top_p, temperature=temperature)
        await one.complete(top_p=2 / MODEL.vocab_size)
        *greedy, drawn = [request.sampling for request in found]
        assert {(sampling.temperature, sampling.top_p) for sampling in greedy} == {(0.0, 1.0)}
        assert (drawn.temperature, drawn.top_p) == (1.0, 2 / MODEL.vocab_size)


async def test_whole_numbers_may_have_a_point_everywhere() -> None:
    numbers = {"n": 1, "top_k": 5, "seed": 3, "min_tokens": 1, "deadline_ms": 100_000, "max_tokens": 4}
    completion = numbers | {"logprobs": 2, "best_of": 1, "stop_token_ids": [1, 2]}
    chat = numbers | {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3}
    async with rig() as one:
        found: list[Request] = []
        one.scheduler.answer = recording(found)
        for body, call in ((completion, one.complete), (chat, one.chat)):
            await call(**body)
            await call(**{name: _with_a_point(value) for name, value in body.items()})
        assert found[1] == replace(found[0], parent=found[1].parent, arrival=2, submitted_ms=found[1].submitted_ms)
        assert found[3] == replace(found[2], parent=found[3].parent, arrival=4, submitted_ms=found[3].submitted_ms)
        response = await one.post("/detokenize", tokens=[5.0, 6])
        assert response.status_code == 200


def _with_a_point(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_with_a_point, value))
    return float(value) if type(value) is int else value
