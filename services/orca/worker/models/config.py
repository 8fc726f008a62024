"""The architecture of a model, read from its config.json: one frozen dataclass for each.

Three architectures cover the decoder-only models: `GPT2Config` (GPT-2, GPT-3 shapes), `OPTConfig`, and `LlamaConfig`
(Llama, Mistral, Qwen2, Qwen3). Encoder-decoder models have a folder of their own (encoder_decoder/), and so have the
models that check the server (chains/). Options are read under the names of transformers 4
and 5, and an absent option has the meaning that transformers gives it. Options that a family does not read are ignored,
unless they change the output of other families (config_options.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca.core.domain.model import read_config
from orca.core.domain.rope_options import ORIGINAL_POSITIONS, rope_options
from orca.worker.models.chains.chain_config import ChainConfig, Seq2SeqChainConfig, read_chain, read_seq2seq_chain
from orca.worker.models.config_options import ConfigOptions
from orca.worker.models.encoder_decoder.bart_config import BartConfig, read_bart
from orca.worker.models.encoder_decoder.t5_config import T5Config, read_t5
from orca.worker.models.model_shape import EncoderDecoderConfig, ModelShape

ACTIVATIONS = (
    "relu",
    "gelu",
    "gelu_python",
    "gelu_new",
    "gelu_fast",
    "gelu_accurate",
    "gelu_pytorch_tanh",
    "gelu_python_tanh",
    "quick_gelu",
    "silu",
    "swish",
)

# Numbers and lists of numbers that each kind of RoPE needs, and those that it may have.
_ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_MAY_HAVE: Mapping[str, tuple[str, ...]] = {
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
# Kinds whose frequencies depend on the length in pretraining.
_ROPE_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
# Options that mean the same whether they are there or not.
_ROPE_INERT = ("finetuned", ORIGINAL_POSITIONS)


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


ModelConfig = GPT2Config | OPTConfig | LlamaConfig | T5Config | BartConfig | ChainConfig | Seq2SeqChainConfig


def load_config(folder: Path) -> ModelConfig:
    """Read the architecture of the model in `folder`.

    Raises: ModelError that names the file and the option.
    """
    options = ConfigOptions(folder / "config.json", read_config(folder))
    family = options.take("model_type", str, "")
    config: ModelConfig
    if family == "gpt2":
        config = _gpt2(options)
    elif family == "opt":
        config = _opt(options)
    elif family in ("t5", "mt5", "umt5"):
        config = read_t5(options, family)
    elif family in ("bart", "mbart", "m2m_100", "marian"):
        config = read_bart(options, family)
    elif family == "orca_chain":
        config = read_chain(options)
    elif family == "orca_seq2seq_chain":
        config = read_seq2seq_chain(options)
    else:
        config = _llama(options, family)
    options.finish(family)
    if isinstance(config, DecoderConfig | EncoderDecoderConfig) and config.activation not in ACTIVATIONS:
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
    # Qwen3 fixes it (FAMILIES); the others derive it from the hidden size.
    head_dim = options.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise options.error(f"head_dim {head_dim} is odd, and RoPE turns pairs of dimensions")
    has_attention_bias = options.flag("attention_bias", False) if family in ("llama", "qwen3") else False
    if family == "qwen2":
        options.pass_over("attention_bias")  # q, k and v always have a bias there, the output never has
    if family == "qwen3":
        options.pass_over("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm")  # it always has them
    return LlamaConfig(
        vocab_size=options.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=options.size("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=options.size("intermediate_size"),
        activation=options.take("hidden_act", str, "silu"),
        norm_eps=options.number("rms_norm_eps", 1e-6),
        is_tied=options.flag("tie_word_embeddings", False),
        windows=_windows(options, family, layers),
        rope=_rope(options, head_dim),
        has_qkv_bias=has_attention_bias or family == "qwen2",
        has_output_bias=has_attention_bias,
        has_mlp_bias=options.flag("mlp_bias", False) if family == "llama" else False,
        has_qk_norm=family == "qwen3",
    )


def _windows(options: ConfigOptions, family: str, layers: int) -> tuple[int | None, ...]:
    """Read the sliding window of each layer. Mistral has it in all layers, Qwen at most from `max_window_layers` on."""
    if family == "llama":
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
        # As in transformers: 0 lets all layers slide, and without a window none does.
        first = options.take("max_window_layers", int, 28) if window is not None else layers
        default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
        kinds = options.take("layer_types", list, default)
    if len(kinds) != layers or not set(map(str, kinds)) <= {"full_attention", "sliding_attention"}:
        raise options.error(
            f"layer_types = {kinds!r} does not name full_attention or sliding_attention for {layers} layers"
        )
    if window is None and "sliding_attention" in kinds:
        raise options.error("layer_types names sliding_attention but there is no sliding window")
    if window is not None and window < 1:
        raise options.error(f"sliding_window is {window}, not a whole number above 0")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(options: ConfigOptions, head_dim: int) -> Rope:
    """Read RoPE under the names of transformers 4 and 5 (rope_options.py), and ignore what its kind does not read."""
    max_positions = options.size("max_position_embeddings")
    theta = options.number("rope_theta", 10_000.0)
    names = ("rope_scaling", "rope_parameters", ORIGINAL_POSITIONS)
    taken = {name: options.take(name, int if name == ORIGINAL_POSITIONS else dict, None) for name in names}
    values = rope_options(taken)
    partial = values.pop("partial_rotary_factor", None)
    for factor in (partial, options.number("partial_rotary_factor", 1.0)):
        if factor not in (None, 1.0):
            raise options.error(f"partial_rotary_factor = {factor!r} is not supported: only 1 is")
    kind = values.pop("rope_type")
    if kind not in _ROPE_NEEDS:
        raise options.error(f"RoPE type {kind!r} is not one of {', '.join(_ROPE_NEEDS)}")
    own_theta = _rope_number(options, values, "rope_theta")
    original = _rope_number(options, values, ORIGINAL_POSITIONS) if kind in _ROPE_WITH_ORIGINAL else None
    read: dict[str, Any] = {}
    for key in (*_ROPE_NEEDS[kind], *_ROPE_MAY_HAVE.get(kind, ())):
        if key in ("short_factor", "long_factor"):
            read[f"{key}s"] = _rope_factors(options, values, key, head_dim)
        elif key == "truncate":
            read[key] = bool(values.pop(key, True))
        elif (number := _rope_number(options, values, key)) is not None:
            read[key] = number
        elif key in _ROPE_NEEDS[kind]:
            raise options.error(f"RoPE type {kind} needs {key}")
    rope = Rope(
        kind=kind,
        theta=own_theta or theta,
        max_positions=max_positions,
        original_max_positions=int(original or max_positions),
        **read,
    )
    if any(isinstance(value, dict) for value in values.values()):
        raise options.error(f"RoPE options {sorted(values)} differ by layer, which is not supported")
    inert = (*_ROPE_INERT, "rope_theta")
    options.ignore(f"RoPE's {key}" for key, value in values.items() if key not in inert and value is not None)
    return rope


def _rope_number(options: ConfigOptions, values: dict[str, Any], key: str) -> float | None:
    """Take a number above 0; 0 is as good as null where transformers takes it so."""
    value = values.pop(key, None)
    if value is None or (value == 0 and key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise options.error(f"RoPE option {key} is {value!r}, not a number above 0")
    return float(value)


def _rope_factors(options: ConfigOptions, values: dict[str, Any], key: str, head_dim: int) -> tuple[float, ...]:
    """Take a list of numbers, one for each pair of dimensions."""
    factors = values.pop(key, None)
    if factors is None:
        raise options.error(f"RoPE type longrope needs {key}")
    if not isinstance(factors, list) or not all(isinstance(factor, int | float) for factor in factors):
        raise options.error(f"RoPE option {key} is {factors!r}, not a list of numbers")
    if len(factors) != head_dim // 2:
        raise options.error(f"RoPE option {key} has {len(factors)} numbers; head_dim {head_dim} needs {head_dim // 2}")
    return tuple(float(factor) for factor in factors)
