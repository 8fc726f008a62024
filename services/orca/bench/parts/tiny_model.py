"""A checkpoint of a llama-type model of a few thousand weights, written straight into safetensors."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 32, 4, 2, 8, 48, 97


def write_tiny_model(folder: Path, *, layers: int = 3, hidden: int = HIDDEN) -> Path:
    """Write random weights, so large that the greedy output depends on each prompt token and near-ties are rare."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * gain / math.sqrt(columns)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden, 3.0 * math.sqrt(hidden)),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCAB, hidden, 8.0),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        tensors |= {
            f"{name}input_layernorm.weight": torch.ones(hidden),
            f"{name}post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, hidden, 3.0),
            f"{name}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden, 3.0),
            f"{name}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden, 3.0),
            f"{name}self_attn.o_proj.weight": matrix(hidden, HEADS * HEAD_DIM, 3.0),
            f"{name}mlp.gate_proj.weight": matrix(INNER, hidden, 3.0),
            f"{name}mlp.up_proj.weight": matrix(INNER, hidden, 3.0),
            f"{name}mlp.down_proj.weight": matrix(hidden, INNER, 3.0),
        }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": hidden,
                "intermediate_size": INNER,
                "num_hidden_layers": layers,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "head_dim": HEAD_DIM,
                "vocab_size": VOCAB,
                "max_position_embeddings": 256,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "bos_token_id": None,
                "eos_token_id": None,
            }
        )
    )
    return folder
