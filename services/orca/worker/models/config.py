"""The architecture of a model, read from its config.json: one frozen dataclass for each.

Three architectures cover the language models: `GPT2Config` (GPT-2, GPT-3 shapes), `OPTConfig`, and `LlamaConfig`
(Llama, Mistral, Qwen2, Qwen3). `ChainConfig` is the model that checks the server (models/chain.py). Options are read
under the names of transformers 4 and 5, and an absent option has the meaning that transformers gives it. An unknown
option with a value is refused by name: it might change the output (config_options.py).
"""

from dataclasses import dataclass
from pathlib import Path

from orca.core.domain.model import read_config
from orca.worker.models.config_options import ConfigOptions

ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "silu", "swish")

# Equally likely tokens that the model which checks the server samples from: a power of two, so that the choice does not
# depend on rounding.
CHAIN_CHOICES = 16
# Positions up to which its sums over positions are exact in float32 (models/chain.py).
CHAIN_POSITIONS_MAX = 4096

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding, with the scaling that a config asks for."""

    kind: str  # default, linear, dynamic, llama3, yarn or longrope
    theta: float = 10_000.0
    factor: float | None = None
    max_positions: int  # max_position_embeddings: for `dynamic`, and to derive a factor that is not given
    original_max_positions: int  # sequence length in pretraining: llama3, yarn, longrope
    attention_factor: float | None = None  # multiplies cos and sin: yarn, longrope; None derives it from the factor
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope: one per pair of dimensions
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of any model that a stage must know to lay out a step and its KV cache."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool  # head and embedding are one matrix
    windows: tuple[int | None, ...]  # for each layer: positions that a token sees, itself included; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelShape):
    """The options that all language models share."""

    intermediate_size: int
    activation: str  # one of ACTIVATIONS
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(DecoderConfig):
    max_positions: int
    scales: tuple[float, ...]  # for each layer: factor of the attention scores


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig(DecoderConfig):
    max_positions: int
    embedding_dim: int  # word_embed_proj_dim; projected to hidden_size and back if it differs
    norms_first: bool  # do_layer_norm_before
    has_final_norm: bool
    has_bias: bool
    has_norm_weights: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    rope: Rope
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool  # RMSNorm over each head of q and k (Qwen3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainConfig(ModelShape):
    """The model that checks the server."""


ModelConfig = GPT2Config | OPTConfig | LlamaConfig | ChainConfig


def load_config(folder: Path) -> ModelConfig:
    """Read the architecture of the model in `folder`.

    Raises: ModelError that names the file and the option.
    """
    options = ConfigOptions(folder / "config.json", read_config(folder))
    options.refuse_unless("quantization_config", None)
    family = options.take("model_type", str, "")
    config: ModelConfig
    if family == "gpt2":
        config = _gpt2(options)
    elif family == "opt":
        config = _opt(options)
    elif family == "orca_chain":
        config = _chain(options)
    else:
        config = _llama(options, family)
    options.refuse_rest(family)
    if isinstance(config, DecoderConfig) and config.activation not in ACTIVATIONS:
        raise options.error(f"activation {config.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if config.num_heads % config.num_kv_heads:
        raise options.error(f"{config.num_heads} heads do not share {config.num_kv_heads} key-value heads evenly")
    return config


def _gpt2(options: ConfigOptions) -> GPT2Config:
    hidden = options.size("n_embd")
    heads = options.size("n_head")
    layers = options.size("n_layer")
    if hidden % heads:
        raise options.error(f"n_embd {hidden} is not a multiple of n_head {heads}")
    head_dim = hidden // heads
    scale = head_dim**-0.5 if options.flag("scale_attn_weights", True) else 1.0
    by_layer = options.flag("scale_attn_by_inverse_layer_idx", False)
    options.refuse_unless("add_cross_attention", False)
    return GPT2Config(
        vocab_size=options.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=options.size("n_inner", 4 * hidden),
        activation=options.take("activation_function", str, "gelu_new"),
        norm_eps=options.number("layer_norm_epsilon", 1e-5),
        is_tied=options.flag("tie_word_embeddings", True),
        windows=(None,) * layers,
        max_positions=options.size("n_positions"),
        scales=tuple(scale / (layer + 1) if by_layer else scale for layer in range(layers)),
    )


def _opt(options: ConfigOptions) -> OPTConfig:
    hidden = options.size("hidden_size")
    heads = options.size("num_attention_heads")
    layers = options.size("num_hidden_layers")
    if hidden % heads:
        raise options.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    norms_first = options.flag("do_layer_norm_before", True)
    return OPTConfig(
        vocab_size=options.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=options.size("ffn_dim"),
        activation=options.take("activation_function", str, "relu"),
        norm_eps=1e-5,
        is_tied=options.flag("tie_word_embeddings", True),
        windows=(None,) * layers,
        max_positions=options.size("max_position_embeddings"),
        embedding_dim=options.size("word_embed_proj_dim", hidden),
        norms_first=norms_first,
        has_final_norm=norms_first and not options.flag("_remove_final_layer_norm", False),
        has_bias=options.flag("enable_bias", True),
        has_norm_weights=options.flag("layer_norm_elementwise_affine", True),
    )


def _llama(options: ConfigOptions, family: str) -> LlamaConfig:
    hidden = options.size("hidden_size")
    heads = options.size("num_attention_heads")
    layers = options.size("num_hidden_layers")
    # Qwen3 fixes 128; the others derive it from the hidden size.
    head_dim = options.size("head_dim", 128 if family == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise options.error(f"head_dim {head_dim} is odd, and RoPE turns pairs of dimensions")
    default_kv_heads = 8 if family == "mistral" else heads
    has_attention_bias = options.flag("attention_bias", False) if family in ("llama", "qwen3") else False
    return LlamaConfig(
        vocab_size=options.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=options.size("num_key_value_heads", default_kv_heads),
        head_dim=head_dim,
        intermediate_size=options.size("intermediate_size"),
        activation=options.take("hidden_act", str, "silu"),
        norm_eps=options.number("rms_norm_eps", 1e-6),
        is_tied=options.flag("tie_word_embeddings", False),
        windows=_windows(options, family, layers),
        rope=_rope(options),
        has_qkv_bias=has_attention_bias or family == "qwen2",
        has_output_bias=has_attention_bias,
        has_mlp_bias=options.flag("mlp_bias", False) if family == "llama" else False,
        has_qk_norm=family == "qwen3",
    )


def _chain(options: ConfigOptions) -> ChainConfig:
    layers = options.size("num_hidden_layers")
    heads = options.size("num_attention_heads")
    vocab_size = options.size("vocab_size")
    positions = options.size("max_position_embeddings")
    if vocab_size < CHAIN_CHOICES:
        raise options.error(
            f"vocab_size {vocab_size} is below {CHAIN_CHOICES}, the tokens that one sample chooses from"
        )
    if positions > CHAIN_POSITIONS_MAX:
        raise options.error(f"max_position_embeddings {positions} is above {CHAIN_POSITIONS_MAX}: sums become inexact")
    return ChainConfig(
        vocab_size=vocab_size,
        hidden_size=2,  # the two halves of a state
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=options.size("num_key_value_heads", heads),
        head_dim=options.size("head_dim"),
        is_tied=False,
        windows=(None,) * layers,
    )


def _windows(options: ConfigOptions, family: str, layers: int) -> tuple[int | None, ...]:
    """Read the sliding window of each layer. Mistral has it in all layers, Qwen at most from `max_window_layers` on."""
    if family == "llama":
        options.refuse_unless("sliding_window", None)
        kinds = options.take("layer_types", list, ["full_attention"] * layers)
        window = None
    elif family == "mistral":
        window = options.take("sliding_window", int, None if "sliding_window" in options else 4096)
        kind = "full_attention" if window is None else "sliding_attention"
        kinds = options.take("layer_types", list, [kind] * layers)
        if kinds != [kind] * layers:
            raise options.error(f"layer_types = {kinds!r} is not supported for mistral")
    else:
        slides = options.flag("use_sliding_window", False)
        window = options.take("sliding_window", int, None if "sliding_window" in options else 4096)
        window = window if slides else None
        first = options.size("max_window_layers", 28) if slides else layers
        default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
        kinds = options.take("layer_types", list, default)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise options.error(
            f"layer_types = {kinds!r} does not name full_attention or sliding_attention for {layers} layers"
        )
    if window is None and "sliding_attention" in kinds:
        raise options.error("layer_types names sliding_attention but there is no sliding window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(options: ConfigOptions) -> Rope:
    """Read RoPE from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    max_positions = options.size("max_position_embeddings")
    theta = options.number("rope_theta", 10_000.0)
    old = options.take("rope_scaling", dict, {})
    new = options.take("rope_parameters", dict, {})
    values = dict(old or new)
    partial = options.number("partial_rotary_factor", 1.0)
    if float(values.pop("partial_rotary_factor", partial)) != 1.0:
        raise options.error("partial_rotary_factor other than 1 is not supported")
    kind = values.pop("rope_type", None) or values.get("type") or "default"
    values.pop("type", None)
    kind = "longrope" if kind == "su" else kind
    if kind not in _ROPE_KEYS:
        raise options.error(f"RoPE type {kind!r} is not one of {', '.join(_ROPE_KEYS)}")
    for key in _ROPE_KEYS[kind]:
        if values.get(key) is None:
            raise options.error(f"RoPE type {kind} needs {key}")
    outer = options.take("original_max_position_embeddings", int, None)
    inner = values.pop("original_max_position_embeddings", None)
    rope = Rope(
        kind=kind,
        theta=float(values.pop("rope_theta", None) or theta),
        factor=values.pop("factor", None),
        max_positions=max_positions,
        original_max_positions=outer or inner or max_positions,
        attention_factor=values.pop("attention_factor", None),
        low_freq_factor=float(values.pop("low_freq_factor", None) or 1.0),
        high_freq_factor=float(values.pop("high_freq_factor", None) or 4.0),
        beta_fast=float(values.pop("beta_fast", None) or 32),
        beta_slow=float(values.pop("beta_slow", None) or 1),
        mscale=values.pop("mscale", None),
        mscale_all_dim=values.pop("mscale_all_dim", None),
        truncate=bool(values.pop("truncate", True)),
        short_factors=tuple(values.pop("short_factor", None) or ()),
        long_factors=tuple(values.pop("long_factor", None) or ()),
    )
    values.pop("finetuned", None)
    if any(value is not None for value in values.values()):
        raise options.error(f"RoPE options {sorted(values)} are not known")
    return rope
