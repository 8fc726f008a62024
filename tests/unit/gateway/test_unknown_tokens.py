"""A tokenizer with more ids than the model has rows: text with such a token is refused as its id is, by field."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import tokenizers
from tokenizers import AddedToken

from orca.core.domain.text import Tokenizer
from orca.gateway.models import models
from orca.gateway.models.models import ServedModel
from orca.gateway.settings import GatewaySettings
from support.gateway.gateway_rig import MODEL, TEMPLATE, rig, tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def inner_with(*added: str) -> tokenizers.Tokenizer:
    """The rig's tokenizer with more tokens, which get the next ids."""
    inner = tokenizers.Tokenizer.from_str(tokenizer()._inner.to_str())
    inner.add_special_tokens([AddedToken(text, special=True) for text in added])
    return inner


INNER = inner_with("<pad>")
PAD = INNER.token_to_id("<pad>")
INFO = replace(MODEL, vocab_size=PAD)  # the pad token was added, and the model not resized


def not_resized() -> ServedModel:
    decoder = orjson.loads(INNER.to_str())["decoder"]
    one = Tokenizer(INNER, decoder=decoder, named_special_tokens={"eos_token": "<|end|>"}, chat_template=TEMPLATE)
    return ServedModel.of(INFO, one, GatewaySettings(model="tiny"))


BAD: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "hello <pad> world"}, "prompt"),
    (COMPLETIONS, {"prompt": [PAD]}, "prompt"),
    (COMPLETIONS, {"prompt": ["hello", "the <pad>"]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": "<pad>", "n": 3, "stream": True}, "prompt"),
    (COMPLETIONS, {"prompt": "<pad>", "echo": True, "max_tokens": 0, "logprobs": 1}, "prompt"),
    (COMPLETIONS, {"prompt": "<pad>", "background": True}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 5_000 + "<pad>"}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "what does <pad> mean?"}]}, "messages"),
    (CHAT, {"messages": [{"role": "system", "content": "<pad>"}, {"role": "user", "content": "a"}]}, "messages"),
    ("/tokenize", {"prompt": "hello <pad> world"}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "<pad>"}]}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=lambda value: str(value)[:50])
async def test_a_token_that_the_model_has_no_row_for_is_a_400_by_field(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with rig(model=INFO, newest=not_resized()) as one:
        status, error = await one.error(path, **body)
        assert (status, error["param"], error["code"]) == (400, param, "invalid_value")
        assert f"0 to {PAD - 1}" in error["message"]
        assert one.pool.state.parents == {}, "nothing was stored"


async def test_text_without_that_token_and_stop_strings_with_it_are_served() -> None:
    async with rig(model=INFO, newest=not_resized()) as one:
        assert (await one.complete(prompt="hello", stop="<pad>"))["choices"][0]["finish_reason"] == "length"


def load(folder: Path, rows: int, caplog: pytest.LogCaptureFixture) -> str:
    """Load a model folder with so many rows as a gateway does. Returns: what was logged."""
    folder.mkdir()
    INNER.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    config = {"model_type": "gpt2", "vocab_size": rows, "n_positions": 64, "n_layer": 1}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    caplog.clear()
    models.load_newest(GatewaySettings(model=str(folder)))
    return caplog.text


def test_a_start_says_that_the_tokenizer_has_more_ids_than_the_model_has_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = load(tmp_path / "short", PAD, caplog)
    assert f"the tokenizer of short has 1 token ids that the model has no row for ('<pad>' = {PAD})" in said
    assert "WARNING" in said
    assert load(tmp_path / "resized", PAD + 1, caplog) == ""
    assert f"has {PAD - 1} token ids" in load(tmp_path / "tiny", 2, caplog)
