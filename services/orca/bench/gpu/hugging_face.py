"""The Hugging Face model with the same random weights as a stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.peers.transformers_peer import import_transformers, without_end_token
from orca.worker.models.config import LlamaConfig


def hugging_face_model(config: LlamaConfig, tensors: RandomTensors) -> Any:
    """Return a `LlamaForCausalLM`, ready to generate, on the tensors' device.

    Raises: ModuleNotFoundError without transformers.
    """
    transformers = import_transformers()
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.rope.max_positions,
        rms_norm_eps=config.norm_eps,
        hidden_act=config.activation,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(tensors.device):
        model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=tensors.dtype, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.read(name, tuple(parameter.shape)))
    return without_end_token(model)


@contextmanager
def without_hub() -> Iterator[None]:
    """Return a block in which the library sends no requests to the hub. Otherwise it searches there for kernels."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
