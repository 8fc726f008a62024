"""`allowed_token_ids` and `bad_words`: the limits that stages get, and clear errors for all that is none."""

from typing import Any

import pytest

from orca.core.domain.request import Request, SamplingParams
from orca.gateway.settings import GatewaySettings
from orca.pool.memory.pool import MemoryPool
from support.gateway.gateway_rig import MODEL, Rig, WallClock, error_of, ids, rig

PATHS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


async def call(one: Rig, path: str = "/v1/completions", **fields: Any) -> Any:
    return await one.post(path, **{**PATHS[path], "max_tokens": 4, **fields})


def limits(sampling: SamplingParams) -> tuple[Any, Any, Any]:
    return sampling.allowed_token_ids, sampling.forbidden_token_ids, sampling.forbidden_sequences


@pytest.mark.parametrize("path", PATHS)
async def test_all_choices_of_a_call_have_its_limits(one: Rig, accepted: list[Request], path: str) -> None:
    alone, several = ("e", " the", "<|end|>"), (" e", "whale", " whale", " <|end|>")
    assert [len(ids(text)) > 1 for text in (*alone, *several)] == [False] * 3 + [True] * 4
    response = await call(one, path, n=2, allowed_token_ids=[9, 5.0, 9], bad_words=["e", " the", " whale", "<|end|>"])
    assert response.status_code == 200, response.text
    for request in accepted:
        allowed, forbidden, sequences = limits(request.sampling)
        assert allowed == (9, 5)
        assert {*map(ids, alone)} <= {(token_id,) for token_id in forbidden}
        assert {*map(ids, several)} <= {*sequences}
        assert len(forbidden) + len(sequences) == 8


async def test_white_space_alone_is_a_word(one: Rig, accepted: list[Request]) -> None:
    await call(one, bad_words=["\n"])
    assert limits(accepted[0].sampling) == ((), ids("\n"), ())


@pytest.mark.parametrize("fields", [{}, {"bad_words": []}, {"bad_words": None, "allowed_token_ids": None}], ids=str)
async def test_no_limits_change_nothing(one: Rig, accepted: list[Request], fields: dict[str, Any]) -> None:
    assert (await call(one, **fields)).status_code == 200
    assert not accepted[0].sampling.has_token_mask


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [1, MODEL.vocab_size]}, "allowed_token_ids", f"{MODEL.vocab_size} is not a token id"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "-1 is not a token id"),
    ({"allowed_token_ids": [1] * 5}, "allowed_token_ids", "has 5 token ids, more than 4"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]", ""),
    ({"allowed_token_ids": 5}, "allowed_token_ids", ""),
    ({"bad_words": ["a", ""]}, "bad_words[1]", "bad_words[1]: must have 1 to 8 characters, not 0"),
    ({"bad_words": ["a" * 9]}, "bad_words[0]", "bad_words[0]: must have 1 to 8 characters, not 9"),
    ({"bad_words": ["a"] * 4}, "bad_words", "has 4 texts, more than 3"),
    ({"bad_words": [1]}, "bad_words[0]", ""),
    ({"bad_words": "a"}, "bad_words", ""),
    ({"bad_words": ["e", "h"], "allowed_token_ids": [*ids("h"), *ids("e")]}, "bad_words", "every token"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_limits_are_refused_by_name(path: str, fields: dict[str, Any], param: str, words: str) -> None:
    settings = GatewaySettings(model="tiny", allowed_token_ids_max=4, bad_words_max=3, bad_word_characters_max=8)
    async with rig(settings=settings, schedules=False) as one:
        status, error = error_of(await call(one, path, **fields))
        assert (status, error["param"]) == (400, param)
        assert words in error["message"]
        assert not one.pool.state.parents


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["e"]}, "bad_words"),
        ({"bad_words": ["fox"]}, "bad_words"),
    ],
)
async def test_limits_wait_for_the_schema_that_has_them(fields: dict[str, Any], param: str) -> None:
    pool = MemoryPool(WallClock())
    async with rig(pool=pool) as one:
        await pool.set_schema(2)
        status, error = error_of(await call(one, **fields))
        assert (status, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param}: not available while schema 2 ")
        await pool.set_schema(3)
        assert (await call(one, **fields)).status_code == 200
