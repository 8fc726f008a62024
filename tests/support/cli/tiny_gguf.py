"""A tiny Llama as GGUF file, with the tokenizer settings and quantized types of the GGUF file of SmolLM2."""

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HIDDEN, FORWARD, HEADS, KV_HEADS, LAYERS, VOCABULARY = 64, 96, 4, 2, 2, 320
TEXT = [
    "the rain in Spain, since 1815 and 1913  stays  in 12 plains",
    "Mr. Darcy had  ten thousand a year, 10000 pounds",
]


def write_tiny_gguf(path: Path) -> Path:
    """Write the file. Matrices are Q4_1, the embedding is Q8_0 and also the head, as in the published file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a tiny Llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    _add_tokenizer(writer)
    numbers = np.random.default_rng(5)
    _add_tensor(writer, "token_embd.weight", numbers.normal(size=(VOCABULARY, HIDDEN)), gguf.GGMLQuantizationType.Q8_0)
    for name, shape in _layer_shapes():
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_1
        _add_tensor(writer, name, numbers.normal(scale=0.2, size=shape) + (len(shape) == 1), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    trained.train_from_iterator(TEXT * 3, trainer)
    tokens = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    tokens += [f"<unused{number}>" for number in range(VOCABULARY - len(tokens))]
    merges = json.loads(trained.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    values = values.astype(np.float32)
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _layer_shapes() -> list[tuple[str, tuple[int, ...]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: list[tuple[str, tuple[int, ...]]] = [("output_norm.weight", (HIDDEN,))]
    for layer in range(LAYERS):
        named = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FORWARD, HIDDEN),
            "ffn_up": (FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FORWARD),
        }
        shapes += [(f"blk.{layer}.{name}.weight", shape) for name, shape in named.items()]
    return shapes
