"""Writes and reads the folder of a model of type `orca_chain`, which checks the server instead of generating text.

It uses the standard library alone, so that a test client needs no torch. The docstring of chain_oracle.py explains the
numbers; for the stages, orca.worker.models.chain does.

    config.json          sizes, and the type that makes the stages compute the chain
    model.safetensors    salts and multipliers: small whole numbers that depend on the seed, so that folders with
                         different seeds are different revisions with different tokens
    tokenizer.json       token 17 is the text "<17>": a text shows its tokens, and any text can be a prompt (each
                         part of it that is not a token counts as token 0)
"""

import json
import random
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WEIGHT_BELOW = 2**24  # whole numbers below it are exact in float32
_TOKEN = re.compile(r"<([0-9]+)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer."""

    keep: tuple[int, ...]  # one per channel of the KV heads
    mix: tuple[int, ...]  # one per channel of the query heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainModel:
    """The sizes and weights of a chain model."""

    vocab_size: int
    heads: int
    kv_heads: int  # heads / kv_heads query heads read each
    head_dim: int  # number of channels of a head
    max_model_len: int
    eos_token_id: int | None
    embedding_salt: int
    layers: tuple[Layer, ...]
    head_salt: int


def make_chain_model(
    folder: Path,
    *,
    layers: int = 3,
    vocab_size: int = 1000,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 4,
    max_model_len: int = 1024,
    eos_token_id: int | None = None,
    seed: int = 0,
) -> ChainModel:
    """Write a chain model into `folder`, which is made if it does not exist.

    Args:
        layers: at least as many as stages; stages hold whole layers.
        vocab_size: 16 or more; a wrong token equals the right one about once in `vocab_size` times.
        heads: at least as many as tensor ranks in a stage, and a multiple of `kv_heads`.
        max_model_len: prompt and output in tokens, up to 4096.
        eos_token_id: ends an output when it is drawn, about once in `vocab_size` tokens; None: no token does.
        seed: of the weights.
    """
    number = random.Random(seed).randrange
    model = ChainModel(
        vocab_size=vocab_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=max_model_len,
        eos_token_id=eos_token_id,
        embedding_salt=number(_WEIGHT_BELOW),
        layers=tuple(
            Layer(
                keep=tuple(number(_WEIGHT_BELOW) for _ in range(kv_heads * head_dim)),
                mix=tuple(number(1, _WEIGHT_BELOW) for _ in range(heads * head_dim)),
            )
            for _ in range(layers)
        ),
        head_salt=number(_WEIGHT_BELOW),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(model), indent=2))
    (folder / "model.safetensors").write_bytes(_safetensors(_tensors(model)))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab_size)))
    return model


def load_chain_model(folder: Path) -> ChainModel:
    """Read a folder that `make_chain_model` wrote.

    Raises: ValueError if it has another type of model.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "orca_chain":
        raise ValueError(f"{folder} has a model of type {config['model_type']}, not orca_chain")
    tensors = _read_safetensors((folder / "model.safetensors").read_bytes())
    return ChainModel(
        vocab_size=config["vocab_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_model_len=config["max_position_embeddings"],
        eos_token_id=config["eos_token_id"],
        embedding_salt=tensors["embed.salt"][0],
        layers=tuple(
            Layer(keep=tensors[f"layers.{layer}.keep"], mix=tensors[f"layers.{layer}.mix"])
            for layer in range(config["num_hidden_layers"])
        ),
        head_salt=tensors["head.salt"][0],
    )


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


def _config(model: ChainModel) -> dict[str, Any]:
    return {
        "model_type": "orca_chain",
        "architectures": ["OrcaChain"],
        "vocab_size": model.vocab_size,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_model_len,
        "bos_token_id": None,
        "eos_token_id": model.eos_token_id,
    }


def _tensors(model: ChainModel) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "embed.salt": (model.embedding_salt,),
        "head.salt": (model.head_salt,),
    }
    for number, layer in enumerate(model.layers):
        tensors |= {f"layers.{number}.keep": layer.keep, f"layers.{number}.mix": layer.mix}
    return tensors


def _safetensors(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
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


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return the tokenizer.json of the tokenizers library: it splits a text at everything in the form of a token."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
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
