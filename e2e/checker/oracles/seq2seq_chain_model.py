"""Writes and reads the folder of a model of type `orca_seq2seq_chain`: the encoder-decoder sibling of `orca_chain`.

The docstring of seq2seq_chain_oracle.py explains the numbers; for the stages, orca.worker.models.chains.seq2seq_chain
does. model_folder.py describes the files.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checker.oracles.chain_model import Layer
from checker.oracles.model_folder import WEIGHT_BELOW, Tensors, read_folder, write_folder

SEQ2SEQ_CHAIN = "orca_seq2seq_chain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqChainModel:
    """The sizes and weights of an encoder-decoder chain model."""

    vocab_size: int
    encoder_heads: int  # each has keys and values of its own
    heads: int  # of the decoder
    kv_heads: int  # of the decoder; heads / kv_heads query heads read each
    channels: int  # of a head, in both stacks: one less than its size, because one channel marks position 0
    positions: int  # most tokens of a source, and of a target
    start_token_id: int
    eos_token_id: int | None
    encoder_salt: int
    encoder: tuple[Layer, ...]
    decoder_salt: int
    decoder: tuple[Layer, ...]  # over the target so far
    cross: tuple[Layer, ...]  # over the encoder output; one for each layer of the decoder
    head_salt: int

    def beginning(self, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the target before its first generated token: the start token, and the call's prefix."""
        return prefix if prefix[:1] == (self.start_token_id,) else (self.start_token_id, *prefix)


def make_seq2seq_chain_model(
    folder: Path,
    *,
    encoder_layers: int = 2,
    decoder_layers: int = 3,
    vocab_size: int = 1000,
    encoder_heads: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    channels: int = 3,
    positions: int = 1024,
    start_token_id: int = 0,
    eos_token_id: int | None = None,
    seed: int = 0,
) -> Seq2SeqChainModel:
    """Write an encoder-decoder chain model into `folder`, which is made if it does not exist.

    Args:
        vocab_size: 16 or more; a wrong token equals the right one about once in `vocab_size` times.
        encoder_heads, heads: at least as many as tensor ranks in a stage; `heads` is a multiple of `kv_heads`.
        channels: of a head, besides the one that marks position 0.
        positions: most tokens of a source, and of a target, up to 4096.
        eos_token_id: ends an output when it is drawn, about once in `vocab_size` tokens; None: no token does.
        seed: of the weights.
    """
    number = random.Random(seed).randrange

    def layer(kept: int, read: int) -> Layer:
        return Layer(
            keep=tuple(number(WEIGHT_BELOW) for _ in range(kept * channels)),
            mix=tuple(number(1, WEIGHT_BELOW) for _ in range(read * channels)),
        )

    model = Seq2SeqChainModel(
        vocab_size=vocab_size,
        encoder_heads=encoder_heads,
        heads=heads,
        kv_heads=kv_heads,
        channels=channels,
        positions=positions,
        start_token_id=start_token_id,
        eos_token_id=eos_token_id,
        encoder_salt=number(WEIGHT_BELOW),
        encoder=tuple(layer(encoder_heads, encoder_heads) for _ in range(encoder_layers)),
        decoder_salt=number(WEIGHT_BELOW),
        decoder=tuple(layer(kv_heads, heads) for _ in range(decoder_layers)),
        cross=tuple(layer(kv_heads, heads) for _ in range(decoder_layers)),
        head_salt=number(WEIGHT_BELOW),
    )
    write_folder(folder, _config(model), _tensors(model))
    return model


def load_seq2seq_chain_model(folder: Path) -> Seq2SeqChainModel:
    """Read a folder that `make_seq2seq_chain_model` wrote.

    Raises: ValueError if it has another type of model.
    """
    config, tensors = read_folder(folder, SEQ2SEQ_CHAIN)

    def layers(name: Callable[[int], str], count: int) -> tuple[Layer, ...]:
        return tuple(Layer(keep=tensors[f"{name(each)}keep"], mix=tensors[f"{name(each)}mix"]) for each in range(count))

    return Seq2SeqChainModel(
        vocab_size=config["vocab_size"],
        encoder_heads=config["encoder_attention_heads"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        channels=config["head_dim"] - 1,
        positions=config["max_position_embeddings"],
        start_token_id=config["decoder_start_token_id"],
        eos_token_id=config["eos_token_id"],
        encoder_salt=tensors["encoder.embed.salt"][0],
        encoder=layers(_encoder_layer, config["encoder_layers"]),
        decoder_salt=tensors["decoder.embed.salt"][0],
        decoder=layers(_decoder_layer, config["decoder_layers"]),
        cross=layers(_cross, config["decoder_layers"]),
        head_salt=tensors["head.salt"][0],
    )


def _encoder_layer(number: int) -> str:
    return f"encoder.layers.{number}."


def _decoder_layer(number: int) -> str:
    return f"decoder.layers.{number}."


def _cross(number: int) -> str:
    return f"decoder.layers.{number}.cross_"


def _config(model: Seq2SeqChainModel) -> dict[str, Any]:
    return {
        "model_type": SEQ2SEQ_CHAIN,
        "architectures": ["OrcaSeq2SeqChain"],
        "is_encoder_decoder": True,
        "vocab_size": model.vocab_size,
        "encoder_layers": len(model.encoder),
        "decoder_layers": len(model.decoder),
        "encoder_attention_heads": model.encoder_heads,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.channels + 1,
        "max_position_embeddings": model.positions,
        "decoder_start_token_id": model.start_token_id,
        "bos_token_id": None,
        "eos_token_id": model.eos_token_id,
    }


def _tensors(model: Seq2SeqChainModel) -> Tensors:
    tensors: dict[str, tuple[int, ...]] = {
        "encoder.embed.salt": (model.encoder_salt,),
        "decoder.embed.salt": (model.decoder_salt,),
        "head.salt": (model.head_salt,),
    }
    for name, layers in ((_encoder_layer, model.encoder), (_decoder_layer, model.decoder), (_cross, model.cross)):
        for number, layer in enumerate(layers):
            tensors |= {f"{name(number)}keep": layer.keep, f"{name(number)}mix": layer.mix}
    return tensors
