"""The architecture of T5 and its relatives: T5, T5 1.1, flan-T5, ByT5, UL2 (t5), mT5 (mt5) and umT5 (umt5)."""

from dataclasses import dataclass

from orca.worker.models.config_options import ConfigOptions
from orca.worker.models.model_shape import EncoderDecoderConfig, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
    """The options of T5. Stacks differ only in their number of layers."""

    is_gated: bool  # the MLP multiplies an activated gate by a second projection
    buckets: int  # numbers of the relative position bias for each head
    max_distance: int  # distances from here on share a bucket
    has_bias_in_each_layer: bool  # umT5; otherwise all layers of a stack apply the bias of its first one
    logit_scale: float


def read_t5(options: ConfigOptions, family: str) -> T5Config:
    """Read the options. Raises: ModelError that names the file and the option."""
    layers = options.size("num_layers")
    decoder_layers = options.size("num_decoder_layers", layers)
    hidden, heads, head_dim = options.size("d_model"), options.size("num_heads"), options.size("d_kv")
    intermediate_size = options.size("d_ff")
    activation, is_gated = _activation(options, family)
    is_tied = options.flag("tie_word_embeddings", True)
    buckets = options.size("relative_attention_num_buckets", 32)
    max_distance = options.size("relative_attention_max_distance", 128)
    # The encoder uses half of them for each direction, and takes the logarithm of distances over half of those.
    if buckets < 4 or max_distance <= buckets // 2:
        raise options.error(
            f"relative_attention_num_buckets {buckets} and relative_attention_max_distance {max_distance} leave no "
            "bucket for large distances"
        )
    # Options of transformers' own objects, which T5 does not read, or which core.domain reads.
    options.pass_over("is_encoder_decoder", "n_positions", "output_past", "classifier_dropout", "dropout_rate")
    options.pass_over("initializer_factor", "is_decoder", "sequence_length")
    return T5Config(
        vocab_size=options.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers + decoder_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        is_tied=is_tied,
        windows=(None,) * (layers + decoder_layers),
        encoder=Stack(layers=layers, heads=heads, head_dim=head_dim, intermediate_size=intermediate_size),
        decoder=Stack(layers=decoder_layers, heads=heads, head_dim=head_dim, intermediate_size=intermediate_size),
        activation=activation,
        norm_eps=options.number("layer_norm_epsilon", 1e-6),
        is_gated=is_gated,
        buckets=buckets,
        max_distance=max_distance,
        has_bias_in_each_layer=family == "umt5",
        logit_scale=_logit_scale(options, family, hidden, is_tied=is_tied),
    )


def _activation(options: ConfigOptions, family: str) -> tuple[str, bool]:
    """Return the activation of the MLP, and whether it is gated."""
    text = options.take("feed_forward_proj", str, "relu" if family == "t5" else "gated-gelu")
    gate, _, name = text.rpartition("-")
    if gate not in ("", "gated"):
        raise options.error(f"feed_forward_proj {text!r} is neither an activation nor gated-<activation>")
    # The original is the tanh approximation, under the name of the exact function.
    activation = "gelu_new" if text == "gated-gelu" else name
    # Two more names for the same facts, which newer files have beside it.
    for key, value in (("dense_act_fn", activation), ("is_gated_act", gate == "gated")):
        if options.take(key, type(value), value) != value:
            raise options.error(f"{key} contradicts feed_forward_proj {text!r}")
    return activation, gate == "gated"


def _logit_scale(options: ConfigOptions, family: str, hidden: int, *, is_tied: bool) -> float:
    """Return the factor of the logits.

    T5's own heads are scaled if they are tied, or as `scale_decoder_outputs` says (transformers 5.17 and newer). As in
    transformers, heads of mT5 never are, and heads of umT5 always.
    """
    is_scaled = {"t5": options.flag("scale_decoder_outputs", is_tied), "mt5": False, "umt5": True}[family]
    return float(hidden**-0.5) if is_scaled else 1.0
