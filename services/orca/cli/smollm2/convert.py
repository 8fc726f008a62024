"""Converts the GGUF file of SmolLM2 into a folder in Hugging Face layout:  python -m orca.cli.smollm2.convert GGUF INTO

transformers reads the GGUF file and widens its weights to float32. The folder then gives Orca and transformers the same
tokens. GGUF is no model format of Orca: this file knows what the one GGUF file lacks.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from orca.cli.smollm2.folder import CHAT_TEMPLATE

NOT_OF_THE_FOLDER = ("quantization_config", "_model_name_or_path", "_name_or_path")
"""Keys of the configuration that speak of the GGUF file."""


def main() -> None:
    gguf, into = map(Path, sys.argv[1:])
    convert(gguf, into)


def convert(gguf: Path, into: Path) -> None:
    """Write the model of a GGUF file into the folder `into`, which exists."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # `save_pretrained` refuses a model that was quantized.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in NOT_OF_THE_FOLDER}
    config["architectures"] = [type(model).__name__]
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ends).save_pretrained(into)
    _write_tokenizer(gguf, into, model.config.max_position_embeddings)


def _write_tokenizer(gguf: Path, into: Path, context_tokens: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF file says `tokenizer.ggml.pre = smollm`: each digit is a piece of its own. transformers does not read
    # this key. Without it, spaces before a number get other tokens than in training.
    pieces = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(pieces)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    tokenizer.model_max_length = context_tokens
    tokenizer.save_pretrained(into)


if __name__ == "__main__":
    main()
