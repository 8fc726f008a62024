"""A model as the services know it without computing with it: its identity, its limits and its special tokens.

This module reads a Hugging Face folder (config.json, generation_config.json, *.safetensors headers). It needs no torch,
so gateway and scheduler need none. It reads the tokenizer only if no config has an EOS. The module worker.models.config
reads the shape of the layers, and worker.weights.loader reads the weights. A folder that cannot be served is refused
here as early as its files show it, with a ModelError that names file and reason. Pickled weights and code that comes
with a model are never touched.
"""

import hashlib
import json
import logging
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca.core.domain.encoder_decoder import EncoderDecoder, read_encoder_decoder
from orca.core.domain.errors import ModelError
from orca.core.domain.log_once import log_once
from orca.core.domain.rope_options import LENGTH_TYPES, rope_options, scaled_positions

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)

# Files that decide which tokens a prompt becomes and what a token means.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
# The revision covers a file up to this size whole, and of a larger one the header and evenly spaced pieces.
_WHOLE_FILE_BYTES = 4 << 20
_PIECES = 256
_PIECE_BYTES = 4096
_HEADER_BYTES_MAX = 100 << 20  # the limit of the safetensors format


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A kind of model that the stages can compute: its names in config.json, and the defaults of absent keys."""

    architecture: str  # class name expected in `architectures`
    base_architecture: str | None = None  # another one: the class without the head, where the embedding is the head
    sizes: Mapping[str, int] = field(default_factory=dict)  # what transformers takes for a size that is absent
    other_names: Mapping[str, str] = field(default_factory=dict)  # more names of keys -> the names that are read
    layers_key: str = "num_hidden_layers"
    positions_key: str = "max_position_embeddings"
    decoder_layers_key: str | None = None  # with an encoder-decoder model; `layers_key` is then of its encoder
    has_rope: bool = True  # RoPE: texts may be longer than the number of positions says
    has_any_length: bool = False  # positions have no numbers (T5): the number of positions is only that of pretraining
    overflows_in_float16: bool = False  # transformers keeps a part of such a model in float32
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    decoder_start_token_id: int | None = None  # of an encoder-decoder model whose files name none
    padding_token_id: int | None = None  # of a model that gives padding no position (EncoderDecoder.padding_token_id)


_LLAMA_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN_SIZES = {
    **_LLAMA_SIZES,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}

_T5_SIZES = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "n_positions": 512,
}
_MT5_SIZES = {
    **_T5_SIZES,
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
}
_T5: Mapping[str, Any] = {
    "other_names": {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
    },
    "layers_key": "num_layers",
    "decoder_layers_key": "num_decoder_layers",
    "positions_key": "n_positions",
    "has_rope": False,
    "has_any_length": True,
    "overflows_in_float16": True,
    "bos_token_id": None,
    "eos_token_id": 1,
}

_BART: Mapping[str, Any] = {
    "other_names": {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
    },
    "layers_key": "encoder_layers",
    "decoder_layers_key": "decoder_layers",
    "has_rope": False,
    "bos_token_id": 0,
}


def _bart_sizes(vocab_size: int) -> Mapping[str, int]:
    """Return the sizes that transformers takes for absent keys, the same in all families of BART's form."""
    return {
        "vocab_size": vocab_size,
        "max_position_embeddings": 1024,
        "d_model": 1024,
        "encoder_layers": 12,
        "encoder_ffn_dim": 4096,
        "encoder_attention_heads": 16,
        "decoder_layers": 12,
        "decoder_ffn_dim": 4096,
        "decoder_attention_heads": 16,
    }


FAMILIES: Mapping[str, ModelFamily] = {
    "gpt2": ModelFamily(
        architecture="GPT2LMHeadModel",
        base_architecture="GPT2Model",
        sizes={"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
        other_names={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        layers_key="n_layer",
        positions_key="n_positions",
        has_rope=False,
        bos_token_id=50256,
        eos_token_id=50256,
    ),
    "opt": ModelFamily(
        architecture="OPTForCausalLM",
        base_architecture="OPTModel",
        sizes={
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
        },
        has_rope=False,
        bos_token_id=2,
        eos_token_id=2,
    ),
    "llama": ModelFamily(
        architecture="LlamaForCausalLM",
        sizes={
            **_LLAMA_SIZES,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
        },
    ),
    "mistral": ModelFamily(
        architecture="MistralForCausalLM",
        sizes={
            **_LLAMA_SIZES,
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "qwen2": ModelFamily(
        architecture="Qwen2ForCausalLM",
        sizes=_QWEN_SIZES,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "qwen3": ModelFamily(
        architecture="Qwen3ForCausalLM",
        sizes={**_QWEN_SIZES, "head_dim": 128},
        bos_token_id=None,
        eos_token_id=None,
    ),
    "t5": ModelFamily(architecture="T5ForConditionalGeneration", sizes=_T5_SIZES, **_T5),
    "mt5": ModelFamily(architecture="MT5ForConditionalGeneration", sizes=_MT5_SIZES, decoder_start_token_id=0, **_T5),
    "umt5": ModelFamily(architecture="UMT5ForConditionalGeneration", sizes=_MT5_SIZES, decoder_start_token_id=0, **_T5),
    # facebook/bart-base and bart-large name BartModel.
    "bart": ModelFamily(
        architecture="BartForConditionalGeneration",
        base_architecture="BartModel",
        sizes=_bart_sizes(50265),
        decoder_start_token_id=2,
        **_BART,
    ),
    "mbart": ModelFamily(
        architecture="MBartForConditionalGeneration",
        base_architecture="MBartModel",
        sizes=_bart_sizes(50265),
        **_BART,
    ),
    "m2m_100": ModelFamily(
        architecture="M2M100ForConditionalGeneration",
        base_architecture="M2M100Model",
        sizes=_bart_sizes(128112),
        decoder_start_token_id=2,
        padding_token_id=1,
        **_BART,
    ),
    "marian": ModelFamily(
        architecture="MarianMTModel",
        base_architecture="MarianModel",
        sizes=_bart_sizes(58101),
        decoder_start_token_id=58100,
        eos_token_id=0,
        **{**_BART, "bos_token_id": None},
    ),
    # Not language models: they check the server (see worker.models.chains).
    "orca_chain": ModelFamily(architecture="OrcaChain", has_rope=False, bos_token_id=None, eos_token_id=None),
    "orca_seq2seq_chain": ModelFamily(
        architecture="OrcaSeq2SeqChain",
        layers_key="encoder_layers",
        decoder_layers_key="decoder_layers",
        has_rope=False,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A served model as every service sees it."""

    folder: Path
    name: str  # what clients call it
    revision: str  # 16 hex digits: hash of what decides outputs (config, tokenizer, dtype, quantization, weights)
    architecture: str  # key of FAMILIES
    dtype: str  # one of DTYPES: the stages compute in it
    quantization: str | None = None  # one of QUANTIZATIONS: matrices are rounded to it; None leaves them in dtype
    vocab_size: int  # rows of the embedding; every token id is below it
    max_model_len: int  # longest prompt + output in tokens; source + target of an encoder-decoder model
    num_layers: int  # of all stacks
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # rising; empty when the model has none
    encoder_decoder: EncoderDecoder | None = None  # None: a decoder-only model
    never_drawn_ids: tuple[int, ...] = ()  # tokens that no output has, rising
    positions: int | None = None  # rows of a decoder-only model's table of learned positions; None: it has none
    has_length_rope: bool = False  # keys depend on the length of their prompt (rope_options.LENGTH_TYPES)

    @property
    def no_prefix_cache(self) -> str | None:
        """Reason why requests cannot begin with KV blocks of others that have the same tokens; None if they can.

        It needs keys and values of a block that depend on the tokens up to its end alone. A layer with a recurrent
        state would have none.
        """
        if self.encoder_decoder is not None:
            return "the keys and values of an encoder-decoder model depend on its source too"
        if self.has_length_rope:
            return "the keys of this model depend on the length of the prompt too: its RoPE is dynamic or longrope"
        return None


def load_model_info(
    folder: Path | str,
    *,
    name: str | None = None,
    dtype: str = "float32",
    quantization: str | None = None,
    max_model_len: int | None = None,
) -> ModelInfo:
    """Read a folder's model without its weights.

    Args:
        folder: a Hugging Face folder on this machine.
        name: what clients call the model; the folder's own name if None.
        dtype: one of DTYPES; part of the revision, because it decides outputs.
        quantization: None, or one of QUANTIZATIONS; part of the revision too.
        max_model_len: the longest prompt + output in tokens, instead of the length that config.json gives; not part of
            the revision. It may be longer if the model has RoPE, with a warning.
    Raises: ModelError, with the file and the reason, when the folder cannot be served.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if quantization not in (None, *QUANTIZATIONS):
        raise ModelError(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    config = read_config(folder)
    family = FAMILIES[config["model_type"]]
    if dtype == "float16" and family.overflows_in_float16:
        raise ModelError(
            f"{folder / 'config.json'}: {config['model_type']} overflows in float16; use bfloat16 or float32"
        )
    own_max_len = _own_max_len(folder, config, family)
    vocab_size = _positive(folder, config, "vocab_size")
    has_generation = (folder / "generation_config.json").is_file()
    generation = _read_json(folder / "generation_config.json") if has_generation else {}
    eos_token_ids = _eos_token_ids(folder, config, generation, family, vocab_size)
    layers, encoder_decoder = _positive(folder, config, family.layers_key), None
    if family.decoder_layers_key is not None:
        _check_vocabularies(folder, config, vocab_size)
        encoder_decoder = read_encoder_decoder(
            folder,
            config,
            generation if has_generation else None,
            encoder_layers=layers,
            positions=None if family.has_any_length else _positive(folder, config, family.positions_key),
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            default_start=family.decoder_start_token_id,
            default_padding=family.padding_token_id,
        )
        has_own = config.get(family.decoder_layers_key) is not None
        layers += _positive(folder, config, family.decoder_layers_key) if has_own else layers
    # The shortest request has a token of the prompt and one of the output.
    least = 2 + (0 if encoder_decoder is None else len(encoder_decoder.beginning()))
    _check_length(folder, family, max_model_len, least, own_max_len)
    return ModelInfo(
        folder=folder,
        name=name if name is not None else folder.resolve().name,
        revision=_revision(folder, dtype, quantization),
        architecture=config["model_type"],
        dtype=dtype,
        quantization=quantization,
        vocab_size=vocab_size,
        max_model_len=own_max_len if max_model_len is None else max_model_len,
        num_layers=layers,
        bos_token_id=generation.get("bos_token_id", config.get("bos_token_id", family.bos_token_id)),
        eos_token_ids=eos_token_ids,
        encoder_decoder=encoder_decoder,
        never_drawn_ids=_never_drawn_ids(
            folder, generation if has_generation else config, has_generation, vocab_size, eos_token_ids, encoder_decoder
        ),
        positions=None if family.has_rope or encoder_decoder is not None else own_max_len,
        has_length_rope=family.has_rope and rope_options(config)["rope_type"] in LENGTH_TYPES,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json, which must describe a model of a known family.

    Code that comes with the model (auto_map) is never run: the family's own code computes it, as transformers does
    unless it is told to trust the model's.

    Returns: the file's values under the names that are read, and the family's sizes for those that are absent.
    Raises: ModelError.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json")
    config = _read_json(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"{path}: model_type {model_type!r} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    architectures = config.get("architectures")
    # The first conversions of Llama wrote LLaMAForCausalLM.
    names = architectures if isinstance(architectures, list) else [architectures]
    served = [name.lower() for name in (family.architecture, family.base_architecture) if name is not None]
    if architectures and not (len(names) == 1 and str(names[0]).lower() in served):
        raise ModelError(
            f"{path}: architectures {architectures!r} is not [{family.architecture!r}], "
            f"the only one served for model_type {model_type!r}"
        )
    # A key that has a second name there counts under that one first, as in transformers, wherever it stands.
    renamed = {name: config[key] for key, name in family.other_names.items() if key in config}
    return {**family.sizes, **{key: config[key] for key in config if key not in family.other_names}, **renamed}


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files with the weights, sorted.

    The order of preference is that of transformers: the file or index that config.json names (transformers_weights),
    model.safetensors, the files of the index. A folder without these has one safetensors file.

    Raises: ModelError if there are none, only pickled ones, or several without an index, or if the index names a file
        that is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    config = folder / "config.json"
    named = _read_json(config).get("transformers_weights") if config.is_file() else None
    if named is not None:
        path = _file_of(folder, config, named)
        return _indexed_files(folder, path) if path.name.endswith(".index.json") else (path,)
    if single.is_file():
        if index.is_file() and not _names_only(index, single.name):
            # Saving a model into the folder of an older one, which had shards, leaves the index behind.
            line = f"{folder} has model.safetensors and an index of other files: the weights are those of the former"
            log_once(__name__, logging.WARNING, f"{line}; delete the one that is out of date")
        return (single,)
    if index.is_file():
        return _indexed_files(folder, index)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],)
    if found:
        raise ModelError(f"{folder} has {len(found)} safetensors files but no model.safetensors.index.json")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        raise ModelError(f"{folder} has only pickled weights ({pickled[0]}); they can run code: convert to safetensors")
    raise ModelError(f"{folder} has no *.safetensors file")


def _indexed_files(folder: Path, index: Path) -> tuple[Path, ...]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    return tuple(_file_of(folder, index, name) for name in sorted({str(name) for name in weight_map.values()}))


def _file_of(folder: Path, source: Path, name: object) -> Path:
    """Return the file that `source` names. Raises: ModelError unless it is a file of `folder` itself."""
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise ModelError(f"{source} names {name}, which is not a file of {folder}")
    return folder / name


def _names_only(index: Path, name: str) -> bool:
    try:
        weight_map = _read_json(index).get("weight_map")
    except ModelError:
        return False
    return isinstance(weight_map, dict) and set(weight_map.values()) == {name}


def count_parameters(folder: Path) -> int:
    """Count the parameters by the headers of the weight files. Raises: ModelError when one cannot be read."""
    return sum(math.prod(shape) for path in weight_files(folder) for shape in _shapes(path))


def _shapes(path: Path) -> list[list[int]]:
    """Return the shapes of a safetensors file's tensors. Raises: ModelError for too few or too many bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = _header_bytes(path, file.read(8), size)
        header = file.read(header_bytes)
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        end = 8 + header_bytes + max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
        shapes = [entry["shape"] for entry in tensors]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: its header cannot be read") from error
    if size != end:
        raise ModelError(f"{path} is not a whole safetensors file: it has {size} bytes instead of {end}")
    return shapes


def _own_max_len(folder: Path, config: Mapping[str, Any], family: ModelFamily) -> int:
    """Return the longest sequence that config.json says."""
    positions = _positive(folder, config, family.positions_key)
    if family.decoder_layers_key is not None:
        return 2 * positions  # source and target
    return scaled_positions(config, positions) if family.has_rope else positions


def _check_vocabularies(folder: Path, config: Mapping[str, Any], vocab_size: int) -> None:
    """Raises: ModelError if sources and targets have vocabularies of different sizes (some Marian models)."""
    of_targets = config.get("decoder_vocab_size") or vocab_size
    if config.get("share_encoder_decoder_embeddings") is False and of_targets != vocab_size:
        raise ModelError(
            f"{folder / 'config.json'}: decoder_vocab_size is {of_targets!r} and vocab_size {vocab_size}: with "
            "share_encoder_decoder_embeddings = false these are two vocabularies, which is not supported"
        )


def _check_length(folder: Path, family: ModelFamily, wanted: int | None, least: int, own: int) -> None:
    """Raises: ModelError for a length below that of any request, or above the positions that the model has learned."""
    if wanted is None or least <= wanted <= own or (family.has_any_length and wanted > own):
        return
    path = folder / "config.json"
    if wanted < least:
        raise ModelError(f"max_model_len {wanted} is below {least}, the tokens of the shortest request")
    if not family.has_rope:
        why = f"{family.positions_key}: the model knows no more positions"
        raise ModelError(f"max_model_len {wanted} is outside {least}..{own}, the length that {path} allows ({why})")
    line = (
        f"max_model_len {wanted} is above {own}, the length that {path} gives: beyond it the model's answers may be "
        "poor; if the model's card names a RoPE scaling for longer texts, add it to the file"
    )
    log_once(__name__, logging.WARNING, line)


def _eos_token_ids(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], family: ModelFamily, vocab_size: int
) -> tuple[int, ...]:
    """Read the ids from generation_config.json first, as `generate` does; then from config.json.

    If neither has one, chats would run to their limit: the tokenizer's EOS counts, and after it the family's default.
    Ids outside the vocabulary are left out: such a token is never drawn.
    """
    sources = [source["eos_token_id"] for source in (generation, config) if "eos_token_id" in source]
    if found := _known_ids(folder, sources[0] if sources else None, vocab_size):
        return found
    # It reads the tokenizer, and needs the library of tokenizers.
    from orca.core.domain.tokenizer_folder import eos_of_tokenizer

    if found := _known_ids(folder, eos_of_tokenizer(folder), vocab_size):
        line = (
            f"{folder}: neither config.json nor generation_config.json has an EOS token; the tokenizer's ends outputs"
        )
        log_once(__name__, logging.INFO, f"{line}: {found[0]}")
        return found
    return () if sources else _known_ids(folder, family.eos_token_id, vocab_size)


def _never_drawn_ids(
    folder: Path,
    settings: Mapping[str, Any],
    has_generation: bool,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    encoder_decoder: EncoderDecoder | None,
) -> tuple[int, ...]:
    """Return the tokens that `generate` never draws with the folder's settings: the padding of opus-mt, for example.

    These are `suppress_tokens`, the `bad_words_ids` of one token that is no end token, and padding that the model has
    no position for. Longer bad words are not applied.

    Args: settings: of generation_config.json, or of config.json if there is no such file.
    Raises: ModelError that names the file and the key.
    """
    path = folder / ("generation_config.json" if has_generation else "config.json")
    suppressed, bad_words = settings.get("suppress_tokens") or [], settings.get("bad_words_ids") or []
    if not isinstance(bad_words, list) or not all(isinstance(word, list) and word for word in bad_words):
        raise ModelError(f"{path}: bad_words_ids is {bad_words!r}, not a list of lists of token ids")
    for key, ids in (("suppress_tokens", suppressed), *(("bad_words_ids", word) for word in bad_words)):
        known = isinstance(ids, list) and all(type(token) is int and 0 <= token < vocab_size for token in ids)
        if not known:
            raise ModelError(f"{path}: {key} has {ids!r}, not token ids below {vocab_size}")
    found = {*suppressed, *(word[0] for word in bad_words if len(word) == 1 and word[0] not in eos_token_ids)}
    if encoder_decoder is not None and encoder_decoder.padding_token_id is not None:
        found.add(encoder_decoder.padding_token_id)
    return tuple(sorted(found))


def _known_ids(folder: Path, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids of a number, a list of them, or null. Raises: ModelError for anything else."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ModelError(f"{folder}: eos_token_id {value!r} is not a token id or a list of them")
    return tuple(sorted({token for token in ids if token < vocab_size}))


def _positive(folder: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{folder / 'config.json'}: {key} is {value!r}, not a whole number above 0")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _revision(folder: Path, dtype: str, quantization: str | None) -> str:
    """Hash what decides outputs. Folder and model names are left out: a copy elsewhere is the same revision."""
    digest = hashlib.sha256(f"dtype {dtype}\n".encode())
    if quantization is not None:
        digest.update(f"quantization {quantization}\n".encode())
    for name in ("config.json", "generation_config.json", *_TOKENIZER_FILES):
        path = folder / name
        if path.is_file():
            _add(digest, name, path.read_bytes())
    for path in weight_files(folder):
        _add(digest, path.name, _weight_sample(path))
    return digest.hexdigest()[:16]


def _add(digest: "hashlib._Hash", name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)}\n".encode())
    digest.update(content)


def _weight_sample(path: Path) -> bytes:
    """Return size, header and evenly spaced pieces of a safetensors file: a megabyte and a header at most."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = _header_bytes(path, file.read(8), size)
        if size <= _WHOLE_FILE_BYTES:
            file.seek(0)
            return file.read()
        parts = [struct.pack("<Q", size), file.read(header_bytes)]
        first, last = 8 + header_bytes, max(size - _PIECE_BYTES, 8 + header_bytes)
        for piece in range(_PIECES):
            file.seek(first + (last - first) * piece // (_PIECES - 1))
            parts.append(file.read(_PIECE_BYTES))
    return b"".join(parts)


def _header_bytes(path: Path, prefix: bytes, size: int) -> int:
    """Return the length of the JSON header that follows the 8-byte prefix (safetensors format)."""
    length = int(struct.unpack("<Q", prefix)[0]) if len(prefix) == 8 else 0
    if not 2 <= length <= min(_HEADER_BYTES_MAX, size - 8):
        raise ModelError(f"{path} is not a whole safetensors file: its header length is {length} of {size} bytes")
    return length
