"""The architecture of BART and of models in its form: mBART, M2M-100 and NLLB (m2m_100), Marian (the original
Transformer)."""

from dataclasses import dataclass
from enum import Enum

from orca.worker.models.config_options import ConfigOptions
from orca.worker.models.model_shape import EncoderDecoderConfig, Stack


class Positions(Enum):
    """The ways in which tokens know their positions."""

    LEARNED = "learned"  # a table in the files, whose first two rows belonged to padding in training
    SINUSOIDS_FROM_PADDING = "sinusoids_from_padding"  # fairseq: computed, from the position behind the padding on
    SINUSOIDS_FROM_ZERO = "sinusoids_from_zero"  # Marian: computed


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig(EncoderDecoderConfig):
    """The options of BART's form."""

    max_positions: int  # of a source, and of a target
    positions: Positions
    first_position: int  # in the table of positions
    embedding_scale: float
    has_embedding_norm: bool
    norms_first: bool  # layers normalise inputs instead of outputs, and each stack ends with a norm
    has_logits_bias: bool


def read_bart(options: ConfigOptions, family: str) -> BartConfig:
    """Read the options. Raises: ModelError that names the file and the option."""
    hidden, max_positions = options.size("d_model"), options.size("max_position_embeddings")
    encoder, decoder = (_stack(options, name, hidden) for name in ("encoder", "decoder"))
    positions = {"m2m_100": Positions.SINUSOIDS_FROM_PADDING, "marian": Positions.SINUSOIDS_FROM_ZERO}.get(
        family, Positions.LEARNED
    )
    if hidden % 2 and positions is not Positions.LEARNED:
        raise options.error(f"d_model {hidden} is odd, and half of a position's numbers are sines, half cosines")
    padding = options.take("pad_token_id", int, 1)
    norms_first, has_embedding_norm = family in ("mbart", "m2m_100"), family in ("bart", "mbart")
    # Options of fairseq that old files have, and that transformers decides by the family.
    decided = {
        "normalize_before": norms_first,
        "add_final_layer_norm": norms_first,
        "normalize_embedding": has_embedding_norm,
        "static_position_embeddings": positions is not Positions.LEARNED,
    }
    for key, value in decided.items():
        if options.flag(key, value) is not value:
            raise options.error(f"{key} is {not value}, and it is {value} in every {family} model")
    scales = options.flag("scale_embedding", family == "m2m_100")
    options.pass_over("is_encoder_decoder", "add_bias_logits", "extra_pos_embeddings", "num_hidden_layers")
    options.pass_over("encoder_layerdrop", "decoder_layerdrop", "classifier_dropout", "classif_dropout")
    options.pass_over("share_encoder_decoder_embeddings", "decoder_vocab_size")
    return BartConfig(
        vocab_size=options.size("vocab_size"),
        hidden_size=hidden,
        num_layers=encoder.layers + decoder.layers,
        num_heads=decoder.heads,
        num_kv_heads=decoder.heads,
        head_dim=decoder.head_dim,
        is_tied=options.flag("tie_word_embeddings", True),
        windows=(None,) * (encoder.layers + decoder.layers),
        encoder=encoder,
        decoder=decoder,
        activation=options.take("activation_function", str, "relu" if family == "m2m_100" else "gelu"),
        norm_eps=1e-5,
        max_positions=max_positions,
        positions=positions,
        first_position={Positions.LEARNED: 2, Positions.SINUSOIDS_FROM_ZERO: 0}.get(positions, padding + 1),
        embedding_scale=hidden**0.5 if scales else 1.0,
        has_embedding_norm=has_embedding_norm,
        norms_first=norms_first,
        has_logits_bias=family != "m2m_100",
    )


def _stack(options: ConfigOptions, name: str, hidden: int) -> Stack:
    heads = options.size(f"{name}_attention_heads")
    if hidden % heads:
        raise options.error(f"d_model {hidden} is not a multiple of {name}_attention_heads {heads}")
    return Stack(
        layers=options.size(f"{name}_layers"),
        heads=heads,
        head_dim=hidden // heads,
        intermediate_size=options.size(f"{name}_ffn_dim"),
    )
