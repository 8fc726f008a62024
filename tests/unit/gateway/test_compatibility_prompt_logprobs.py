"""`prompt_logprobs`: vLLM's list for each prompt, from the log. Stages are compared with transformers elsewhere."""

from typing import Any

import pytest

from orca.core.domain.request import Logprob, Request
from orca.gateway.render.logprobs import prompt_logprobs
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import Rig, WallClock, error_of, ids, rig, tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = {COMPLETIONS: {"prompt": "the fox"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}


async def call(one: Rig, path: str = COMPLETIONS, **fields: Any) -> Any:
    return await one.post(path, **{**PATHS[path], "max_tokens": 2, **fields})


def test_the_list_of_a_prompt_by_hand() -> None:
    a, b, c = ids("a")[0], ids("b")[0], ids("c")[0]
    logged = [Logprob(b, -0.25, ((b, -0.25), (c, -2.0))), Logprob(a, float("-inf"), ((c, -0.5), (b, -1.0)))]
    as_b = {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
    as_a = {"logprob": -9999.0, "rank": None, "decoded_token": "a"}
    first_c = {"logprob": -0.5, "rank": 1, "decoded_token": "c"}
    assert prompt_logprobs((a, b, a), logged, 1, tokenizer()) == [
        None,
        {str(b): as_b},
        {str(a): as_a, str(c): first_c},
    ]
    assert prompt_logprobs((a, b, a), logged, 0, tokenizer()) == [None, {str(b): as_b}, {str(a): as_a}]
    assert prompt_logprobs((a,), (), 5, tokenizer()) == [None]


@pytest.mark.parametrize("top", [0, 3])
async def test_every_choice_of_a_completion_has_the_list_of_its_prompt(one: Rig, top: int) -> None:
    answer = (await call(one, prompt=["the fox", "says"], n=2, prompt_logprobs=top)).json()
    for choice, text in zip(answer["choices"], ["the fox", "the fox", "says", "says"], strict=True):
        found = choice["prompt_logprobs"]
        assert len(found) == len(ids(text))
        assert found[0] is None
        for token_id, entry in zip(ids(text)[1:], found[1:], strict=True):
            assert next(iter(entry)) == str(token_id)
            assert len(entry) == max(top, 1)  # the script's token is the first of its alternatives
        assert choice["logprobs"] is None


async def test_a_chat_has_the_list_beside_its_choices(one: Rig, accepted: list[Request]) -> None:
    answer = (await call(one, CHAT, n=2, prompt_logprobs=1, logprobs=True)).json()
    assert len(answer["prompt_logprobs"]) == len(accepted[0].prompt)
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])


@pytest.mark.parametrize(("logprobs", "top"), [(1, 3), (3, 1)])
async def test_the_echo_keeps_its_own_number_of_alternatives(one: Rig, logprobs: int, top: int) -> None:
    echo = {"echo": True, "logprobs": logprobs}
    plain = (await call(one, **echo)).json()["choices"][0]
    both = (await call(one, **echo, prompt_logprobs=top)).json()["choices"][0]
    assert both["logprobs"] == plain["logprobs"]
    assert [len(entry) for entry in both["prompt_logprobs"][1:]] == [top] * (len(ids("the fox")) - 1)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_has_none(one: Rig, accepted: list[Request], path: str) -> None:
    status, error = error_of(await call(one, path, stream=True, prompt_logprobs=1))
    assert (status, error["param"]) == (400, "prompt_logprobs")
    assert not accepted
    response = await call(one, path, stream=True, prompt_logprobs=0)
    assert response.status_code == 200
    assert "prompt_logprobs" not in response.text
    assert accepted[0].sampling.prompt_logprobs is None


async def test_a_call_without_the_field_has_no_list(one: Rig) -> None:
    assert "prompt_logprobs" not in (await call(one, prompt_logprobs=None)).text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [-1, 21, "1", 1.5, True])
async def test_numbers_outside_0_to_20_are_refused(path: str, value: Any) -> None:
    async with rig(schedules=False) as one:
        status, error = error_of(await call(one, path, prompt_logprobs=value))
        assert (status, error["param"]) == (400, "prompt_logprobs")


async def test_the_answer_of_a_call_in_the_background_has_it(one: Rig) -> None:
    name = (await call(one, background=True, prompt_logprobs=1.0)).json()["id"]
    while (response := await one.client.get(f"/v1/requests/{name}/result")).status_code == 202:
        pass
    assert response.json()["choices"][0]["prompt_logprobs"][0] is None


async def test_the_field_waits_for_the_schema_whose_gateways_know_it() -> None:
    pool = MemoryPool(WallClock())
    await pool.set_schema(2)
    async with rig(pool=pool) as one:
        status, error = error_of(await call(one, prompt_logprobs=1))
        assert (status, error["param"]) == (400, "prompt_logprobs")
        assert "not available while schema 2 " in error["message"]
