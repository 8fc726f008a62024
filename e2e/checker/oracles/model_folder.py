"""Writes and reads the folder of a model that checks the server instead of generating text.

It uses the standard library alone, so that a test client needs no torch.

    config.json          sizes, and the type that makes the stages compute the hashes
    model.safetensors    salts and multipliers: small whole numbers that depend on the seed, so that folders with
                         different seeds are different revisions with different tokens
    tokenizer.json       token 17 is the text "<17>": a text shows its tokens, and any text can be a prompt (each
                         part of it that is not a token counts as token 0)
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WEIGHT_BELOW = 2**24
"""Whole numbers below it are exact in float32."""

Tensors = Mapping[str, tuple[int, ...]]
_TOKEN = re.compile(r"<([0-9]+)>")


def model_type_of(folder: Path) -> str:
    """Return the type of the model in a folder."""
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Write a model into `folder`, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "model.safetensors").write_bytes(_as_safetensors(tensors))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config["vocab_size"], config["eos_token_id"])))


def read_folder(folder: Path, model_type: str) -> tuple[dict[str, Any], Tensors]:
    """Return config and tensors of a folder. Raises: ValueError if it has another type of model."""
    if (found := model_type_of(folder)) != model_type:
        raise ValueError(f"{folder} has a model of type {found}, not {model_type}")
    config = json.loads((folder / "config.json").read_text())
    return config, _read_safetensors((folder / "model.safetensors").read_bytes())


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of a sequence of tokens, like the tokenizer."""
    return "".join(f"<{token}>" for token in tokens)


def tokens_of(text: str) -> list[int]:
    """Return the tokens of an output's text.

    Raises: ValueError if the text does not consist of whole tokens.
    """
    tokens = [int(digits) for digits in _TOKEN.findall(text)]
    if text_of(tokens) != text:
        raise ValueError(f"not a sequence of tokens: {text!r}")
    return tokens


def _as_safetensors(tensors: Tensors) -> bytes:
    """Return vectors as a safetensors file: length of the header in 8 bytes, header in JSON, little-endian float32."""
    header, content = dict[str, Any](), b""
    for name, values in tensors.items():
        packed = struct.pack(f"<{len(values)}f", *values)
        offsets = [len(content), len(content) + len(packed)]
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": offsets}
        content += packed
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the numbers
    return struct.pack("<Q", len(text)) + text + content


def _read_safetensors(file: bytes) -> dict[str, tuple[int, ...]]:
    (length,) = struct.unpack_from("<Q", file)
    content = file[8 + length :]
    return {
        name: tuple(int(value) for (value,) in struct.iter_unpack("<f", content[slice(*entry["data_offsets"])]))
        for name, entry in json.loads(file[8 : 8 + length]).items()
    }


def _tokenizer(vocab_size: int, eos_token_id: int | None) -> dict[str, Any]:
    """Return the tokenizer.json of the tokenizers library: it splits a text at everything in the form of a token.

    EOS has no text in an answer.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    eos = [] if eos_token_id is None else [{"id": eos_token_id, "content": text_of([eos_token_id]), **flags}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": eos,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": _TOKEN.pattern},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {text_of([token]): token for token in range(vocab_size)},
            "unk_token": text_of([0]),
        },
    }
