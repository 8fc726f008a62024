"""The models that are measured, made in memory: configs as worker.models.config reads them out of a folder."""

from pathlib import Path

import torch

from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.gpu.seq2seq.plain_t5 import START
from orca.core.domain.encoder_decoder import EncoderDecoder
from orca.core.domain.model import ModelInfo
from orca.worker.models.build import StageModel, build_stage
from orca.worker.models.config import LlamaConfig, Rope
from orca.worker.models.encoder_decoder.t5_config import T5Config


def llama(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    positions: int = 8192,
) -> LlamaConfig:
    """Return the config of a Llama with an untied head and RoPE without scaling."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        is_tied=False,
        windows=(None,) * layers,
        intermediate_size=intermediate,
        activation="silu",
        norm_eps=1e-5,
        rope=Rope(kind="default", max_positions=positions, original_max_positions=positions),
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
    )


LLAMA_8B = llama(
    layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128_256, positions=8192
)
LLAMA_1B = llama(
    layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64, vocab=128_256, positions=8192
)
_T5_TOKENS = 4096
"""Longest source with its answer. A T5 takes any number."""
SMALL = llama(layers=3, hidden=48, intermediate=80, heads=6, kv_heads=2, head_dim=8, vocab=300, positions=256)
"""A model for a CPU: no size is a multiple of a block, and answers come within seconds."""


def made(config: LlamaConfig | T5Config, tensors: RandomTensors) -> StageModel:
    """Return the whole model on the tensors' device."""
    if isinstance(config, LlamaConfig):
        architecture, longest, encoder_decoder = "llama", config.rope.max_positions, None
    else:
        architecture, longest = "t5", _T5_TOKENS
        encoder_decoder = EncoderDecoder(encoder_layers=config.encoder.layers, start_token_id=START)
    info = ModelInfo(
        folder=Path("random"),
        name="random",
        revision="random",
        architecture=architecture,
        dtype=str(tensors.dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        max_model_len=longest,
        num_layers=config.num_layers,
        bos_token_id=None,
        eos_token_ids=(),
        encoder_decoder=encoder_decoder,
    )
    return build_stage(info, config, tensors, dtype=tensors.dtype, device=tensors.device)


def random_tokens(config: LlamaConfig, count: int, seed: int) -> list[int]:
    """Return the token ids of a random prompt."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=numbers).tolist()
