"""Writes and reads the folder of a model of type `orca_chain`, which checks the server instead of generating text.

The docstring of chain_oracle.py explains the numbers; for the stages, orca.worker.models.chains.chain does.
model_folder.py describes the files.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checker.oracles.model_folder import WEIGHT_BELOW, read_folder, write_folder

CHAIN = "orca_chain"


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
        embedding_salt=number(WEIGHT_BELOW),
        layers=tuple(
            Layer(
                keep=tuple(number(WEIGHT_BELOW) for _ in range(kv_heads * head_dim)),
                mix=tuple(number(1, WEIGHT_BELOW) for _ in range(heads * head_dim)),
            )
            for _ in range(layers)
        ),
        head_salt=number(WEIGHT_BELOW),
    )
    write_folder(folder, _config(model), _tensors(model))
    return model


def load_chain_model(folder: Path) -> ChainModel:
    """Read a folder that `make_chain_model` wrote.

    Raises: ValueError if it has another type of model.
    """
    config, tensors = read_folder(folder, CHAIN)
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


def _config(model: ChainModel) -> dict[str, Any]:
    return {
        "model_type": CHAIN,
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
