"""The architectures of the models that check the server: `orca_chain` and `orca_seq2seq_chain`."""

from dataclasses import dataclass

from orca.worker.models.config_options import ConfigOptions
from orca.worker.models.model_shape import EncoderDecoderShape, ModelShape, Stack

# Equally likely tokens that such a model samples from: a power of two, so that the choice does not depend on rounding.
CHAIN_CHOICES = 16
# Positions up to which its sums over positions are exact in float32 (chain.py).
CHAIN_POSITIONS_MAX = 4096
# Channels of all heads up to which its sums over channels stay below 2^63. A sum over positions is below 2^20 and a
# weight below 2^24, and a layer adds two such sums.
CHAIN_CHANNELS_MAX = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainConfig(ModelShape):
    """The decoder-only model that checks the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqChainConfig(EncoderDecoderShape):
    """The encoder-decoder model that checks the server."""


def read_chain(options: ConfigOptions) -> ChainConfig:
    """Read the options. Raises: ModelError that names the file and the option."""
    layers = options.size("num_hidden_layers")
    heads = options.size("num_attention_heads")
    return ChainConfig(
        vocab_size=_vocab_size(options),
        hidden_size=2,  # the two halves of a state
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=options.size("num_key_value_heads", heads),
        head_dim=options.size("head_dim"),
        is_tied=False,
        windows=(None,) * layers,
    )


def read_seq2seq_chain(options: ConfigOptions) -> Seq2SeqChainConfig:
    """Read the options. Raises: ModelError that names the file and the option."""
    encoder_layers, decoder_layers = options.size("encoder_layers"), options.size("decoder_layers")
    encoder_heads, heads = options.size("encoder_attention_heads"), options.size("num_attention_heads")
    head_dim = options.size("head_dim")
    vocab_size = _vocab_size(options)
    if head_dim < 2:
        raise options.error(
            f"head_dim is {head_dim}: a head has a channel that marks position 0, and at least one more"
        )
    for key, count in (("encoder_attention_heads", encoder_heads), ("num_attention_heads", heads)):
        if count * head_dim > CHAIN_CHANNELS_MAX:
            raise options.error(
                f"{key} {count} x head_dim {head_dim} is above {CHAIN_CHANNELS_MAX} channels: sums become inexact"
            )
    options.pass_over("is_encoder_decoder")
    return Seq2SeqChainConfig(
        vocab_size=vocab_size,
        hidden_size=3,  # the two halves of a state, and the mark of position 0
        num_layers=encoder_layers + decoder_layers,
        num_heads=heads,
        num_kv_heads=options.size("num_key_value_heads", heads),
        head_dim=head_dim,
        is_tied=False,
        windows=(None,) * (encoder_layers + decoder_layers),
        encoder=Stack(layers=encoder_layers, heads=encoder_heads, head_dim=head_dim, intermediate_size=0),
        decoder=Stack(layers=decoder_layers, heads=heads, head_dim=head_dim, intermediate_size=0),
    )


def _vocab_size(options: ConfigOptions) -> int:
    """Read the size of the vocabulary, and check it and the number of positions."""
    vocab_size = options.size("vocab_size")
    positions = options.size("max_position_embeddings")
    if vocab_size < CHAIN_CHOICES:
        raise options.error(
            f"vocab_size {vocab_size} is below {CHAIN_CHOICES}, the tokens that one sample chooses from"
        )
    if positions > CHAIN_POSITIONS_MAX:
        raise options.error(f"max_position_embeddings {positions} is above {CHAIN_POSITIONS_MAX}: sums become inexact")
    return vocab_size
