"""Texts that cannot fit are refused before they are encoded, and many texts leave room for streams between them."""

from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from orca.core.domain.text import Tokenizer
from orca.gateway.errors import ApiError
from orca.gateway.models.encoding import Encoder
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import MODEL, ids, rig, tokenizer, turns_during

LIMIT = MODEL.max_model_len * 64
TOO_LONG = "x" * (LIMIT + 1)


def refuse_to_encode(*_: Any, **__: Any) -> Any:
    raise AssertionError("this text must not be encoded")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a" * LIMIT + "b"]}, "prompt"),
        ("/v1/completions", {"prompt": "é" * (LIMIT // 2 + 1)}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
    ],
    ids=["completion", "list", "two bytes each", "chat"],
)
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    async with rig(schedules=False) as one:
        monkeypatch.setattr(Tokenizer, "encode", refuse_to_encode)
        status, error = await one.error(path, **body)
        assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
        assert f"This model's maximum context length is {MODEL.max_model_len} tokens. " in error["message"]
        assert f"at most {LIMIT} bytes" in error["message"]


async def test_a_text_at_the_bound_is_encoded_and_refused_by_its_tokens() -> None:
    async with rig(schedules=False) as one:
        status, error = await one.error("/v1/completions", prompt="x" * LIMIT)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert f"{len(ids('x' * LIMIT))} tokens" in error["message"]


async def test_a_token_that_is_longer_than_the_setting_raises_the_bound() -> None:
    long = "=" * 100
    inner = tokenizers.Tokenizer(models.WordLevel({long: 0, "?": 1}, unk_token="?"))
    one = Tokenizer(inner, decoder={"type": "ByteLevel"}, named_special_tokens={})
    encoder = Encoder(replace(MODEL, max_model_len=1), one, GatewaySettings(model="tiny"))
    assert await encoder.encode_prompt(long, param="prompt", add_special_tokens=False) == [0]
    with pytest.raises(ApiError, match="101 bytes of text, and at most 100 bytes can fit"):
        await encoder.encode_prompt(long + "=", param="prompt", add_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": "x" * 30_001}, "prompt"), ({"messages": [{"role": "user", "content": "x" * 30_000}]}, "messages")],
    ids=["text", "chat"],
)
async def test_a_text_to_count_may_be_longer_than_a_prompt_up_to_a_bound(body: dict[str, Any], param: str) -> None:
    settings = GatewaySettings(model="tiny", tokenize_bytes_max=30_000)
    async with rig(schedules=False, settings=settings) as one:
        assert (await one.post("/tokenize", prompt="x" * 30_000)).json()["count"] == len(ids("x" * 30_000))
        status, error = await one.error("/tokenize", **body)
        assert (status, error["param"]) == (400, param)
        assert "longer than 30000 bytes" in error["message"]


async def test_the_event_loop_runs_other_work_between_the_texts_of_a_call() -> None:
    encoder = Encoder(MODEL, tokenizer(), GatewaySettings(model="tiny"))

    async def encode_ten() -> None:
        for _ in range(10):
            await encoder.encode_prompt("the fox", param="prompt", add_special_tokens=True)

    assert await turns_during(encode_ten()) >= 10
