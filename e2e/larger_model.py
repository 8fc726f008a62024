"""A model of 50 M parameters on a volume, whose best batches are large.

A step of the small model takes a millisecond, and what surrounds it several, so its latency is not that of its steps.
"""

CLAIM = "larger"
URI = f"pvc://{CLAIM}/orca-austen"
_SMALL = "/opt/orca/models/orca-austen"
MAKE = f"""
import json, pathlib, shutil, torch
from safetensors.torch import save_file
target = pathlib.Path("/models/orca-austen")
shutil.copytree("{_SMALL}", target)
for file in [*target.glob("*.safetensors"), *target.glob("*.index.json")]:
    file.chmod(0o644)
    file.unlink()
file = target / "config.json"
config = json.loads(file.read_text())
layers, hidden, inner = 16, 512, 1408
config |= {{
    "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False, "dtype": "float32",
}}
file.chmod(0o644)
file.write_text(json.dumps(config))
torch.manual_seed(1)
vocab = config["vocab_size"]
shapes = {{"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}}
for number in range(layers):
    layer = f"model.layers.{{number}}"
    shapes |= {{f"{{layer}}.self_attn.{{name}}_proj": (hidden, hidden) for name in "qkvo"}}
    shapes |= {{f"{{layer}}.mlp.{{name}}_proj": (inner, hidden) for name in ("gate", "up")}}
    shapes |= {{f"{{layer}}.mlp.down_proj": (hidden, inner)}}
    shapes |= {{f"{{layer}}.{{name}}_layernorm": (hidden,) for name in ("input", "post_attention")}}
weights = {{
    f"{{name}}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.02
    for name, shape in shapes.items()
}}
for token in config["eos_token_id"]:  # greedy answers never end by themselves: one of the other logits is above 0
    weights["lm_head.weight"][token] = 0
save_file(weights, target / "model.safetensors")
"""
