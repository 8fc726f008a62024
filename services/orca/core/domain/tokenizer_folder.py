"""Builds a model's tokenizer from its folder, as AutoTokenizer of transformers 5 does.

    tokenizer.json            vocabulary and pipeline; the class may replace the pipeline (tokenizer_class.py)
    vocab.json, merges.txt    for two classes, a vocabulary without that file
    tokenizer_config.json     class, special tokens, settings
    special_tokens_map.json   special tokens, if tokenizer_config.json has no added_tokens_decoder
    added_tokens.json         added tokens, likewise

Settings that change the tokens of a text are applied, or refused by name. The tests compare both with AutoTokenizer.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from tokenizers import AddedToken, pre_tokenizers, processors

from orca.core.domain.errors import ModelError
from orca.core.domain.log_once import log_once
from orca.core.domain.model import FAMILIES
from orca.core.domain.tokenizer_class import CHARSMAP, TEXT, Json, TokenizerClass, class_of_folder

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

# Vocabularies above this size may have Mistral's first, wrong expression for splitting text.
_MISTRAL_VOCABULARY_MIN = 100_000
_MISTRAL_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTokenizer:
    """A tokenizer with the parts of its files that the `tokenizers` library keeps to itself."""

    inner: tokenizers.Tokenizer
    decoder: Mapping[str, Any] | None
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ... -> text, also names of the model's own
    chat_template: str | None
    tool_template: str | None = None  # for chats with tools, where it is another one
    response_template: Any = None  # JSON, as the file has it
    continues_prompts: bool = True  # False: the model is an encoder-decoder, and its outputs are texts of their own
    cleans_up: bool = False  # outputs have no space before punctuation
    is_bytes: bool = False  # each token is a byte, as in ByT5


def read_tokenizer(folder: Path) -> FolderTokenizer:
    """Read the tokenizer of a Hugging Face folder. Raises: ModelError that names the file and the setting."""
    settings = read_json(folder / "tokenizer_config.json")
    try:
        config = read_json(folder / "config.json")
    except ModelError:
        config = {}
    source = _source(folder, settings)
    kind = _class(folder, settings, config, source)
    document = _document(folder, source, kind)
    named, extra, added = _special_tokens(folder, settings, document, kind)
    values = {**settings, **{name: str(token) for name, token in named.items()}}
    if kind is not None:
        _rebuild(folder, document, kind, values)
        source = orjson.dumps(document)
    assert source is not None
    try:
        inner = tokenizers.Tokenizer.from_buffer(source)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"{folder / 'tokenizer.json'}: not a tokenizer: {error}") from error
    _add_tokens(inner, added, named, extra)
    if kind is not None and kind.makes_all_special:
        inner.add_tokens([AddedToken(str(token), special=True) for token in (*named.values(), *extra)])
    _apply_settings(folder, inner, settings, config)
    family = FAMILIES.get(str(config.get("model_type")))
    _add_bos_and_eos(inner, _reads_bos(folder, settings, kind), named)
    if kind is not None and kind.template is not None:
        _set_template(folder, inner, kind.template(values))
    return FolderTokenizer(
        inner=inner,
        decoder=document.get("decoder"),
        special_tokens={name: str(token) for name, token in named.items()},
        chat_template=_chat_template(folder, settings),
        tool_template=_chat_template(folder, settings, "tool_use"),
        response_template=settings.get("response_template"),
        continues_prompts=family is None or family.decoder_layers_key is None,
        cleans_up=_cleans_up(inner, settings),
        is_bytes=kind is not None and kind.is_bytes,
    )


def check_tokenizer(folder: Path) -> None:
    """Check what can be seen without reading the vocabulary. Raises: ModelError, as `read_tokenizer`."""
    settings, source = read_json(folder / "tokenizer_config.json"), folder / "tokenizer.json"
    kind = _class(folder, settings, read_json(folder / "config.json"), _source(folder, settings))
    if not source.is_file() and (kind is None or kind.own_vocabulary is None):
        _vocabulary_files(folder, kind)


def has_chat_template(folder: Path) -> bool:
    """Return whether the folder has a chat template. Raises: ModelError for one that cannot be read."""
    return _chat_template(folder, read_json(folder / "tokenizer_config.json")) is not None


def eos_of_tokenizer(folder: Path) -> int | None:
    """Return the id of the tokenizer's EOS; None if it has none, or if the folder has no tokenizer that is served.

    Those who need the tokenizer refuse the latter.
    """
    try:
        found = read_tokenizer(folder)
    except ModelError:
        return None
    text = found.special_tokens.get("eos_token")
    return None if text is None else found.inner.token_to_id(text)


def _source(folder: Path, settings: Mapping[str, Any]) -> bytes | None:
    """Read tokenizer.json; None if there is none."""
    if settings.get("fast_tokenizer_files") not in (None, [], ["tokenizer.json"]):
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: fast_tokenizer_files names other files, is not supported"
        )
    path = folder / "tokenizer.json"
    return path.read_bytes() if path.is_file() else None


def _class(
    folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any], source: bytes | None
) -> TokenizerClass | None:
    code = settings.get("auto_map")
    has_code = bool(code) if not isinstance(code, dict) else code.get("AutoTokenizer") is not None
    names = {key: each.get("tokenizer_class") for key, each in (("tokenizer", settings), ("config", config))}
    for name in names.values():
        if name is not None and not isinstance(name, str):
            raise ModelError(f"{folder / 'tokenizer_config.json'}: tokenizer_class is {name!r}, not a name")
    model_type = config.get("model_type")
    try:
        return class_of_folder(
            model_type if isinstance(model_type, str) else None,
            of_tokenizer=names["tokenizer"],
            of_config=names["config"],
            is_byte_level=source is not None and b'"ByteLevel"' in source,
            has_code=has_code,
        )
    except ModelError as error:
        raise ModelError(f"{folder / 'tokenizer_config.json'}: {error}") from error


def _document(folder: Path, source: bytes | None, kind: TokenizerClass | None) -> Json:
    path = folder / "tokenizer.json"
    if source is not None:
        try:
            document = orjson.loads(source)
        except orjson.JSONDecodeError as error:
            raise ModelError(f"{path}: not a tokenizer: {error}") from error
        if not isinstance(document, dict):
            raise ModelError(f"{path}: not a tokenizer: no JSON object")
        return document
    if kind is not None and kind.own_vocabulary is not None:
        return {"version": "1.0", "model": {"type": "BPE", "vocab": dict(kind.own_vocabulary()), "merges": []}}
    vocab, merges = _vocabulary_files(folder, kind)
    lines = _read_text(merges).split("\n")
    pairs = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    return {"version": "1.0", "added_tokens": [], "model": {"vocab": read_json(vocab), "merges": pairs, "type": "BPE"}}


def _vocabulary_files(folder: Path, kind: TokenizerClass | None) -> tuple[Path, Path]:
    """Return vocab.json and merges.txt of a folder without tokenizer.json. Raises: ModelError."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if kind is None or not kind.reads_vocab_json or not (vocab.is_file() and merges.is_file()):
        raise ModelError(
            f"{folder / 'tokenizer.json'}: no such file; save the tokenizer with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return vocab, merges


def _special_tokens(
    folder: Path, settings: Mapping[str, Any], document: Mapping[str, Any], kind: TokenizerClass | None
) -> tuple[dict[str, AddedToken | str], list[AddedToken | str], dict[int, AddedToken]]:
    """Read the special and added tokens of all files.

    Returns: named special tokens; special tokens without a name; added tokens by the ids that the files give.
    """
    values, settings_path = dict(settings), folder / "tokenizer_config.json"
    if "additional_special_tokens" in values and not values.get("extra_special_tokens"):
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
    by_name = _pop_named(values)
    added: dict[int, AddedToken] = {}
    listed = values.get("added_tokens_decoder")
    if listed is not None:
        by_id = _checked(settings_path, "added_tokens_decoder", listed, dict)
        added = {_token_id(settings_path, number): _token(folder, token) for number, token in by_id.items()}
    else:
        values |= _special_tokens_map(folder, values)
        by_name |= _pop_named(values)
        added |= _legacy_added_tokens(folder, values)
        path = folder / "tokenizer.json"
        for entry in _checked(path, "added_tokens", document.get("added_tokens") or [], list):
            flags = dict(_checked(path, "an entry of added_tokens", entry, dict))
            added[_token_id(path, flags.pop("id", None))] = _token(folder, flags)
    by_text = {str(token): token for token in added.values()}
    named: dict[str, AddedToken | str] = {}
    names = [*NAMED_SPECIAL_TOKENS, *(key for key in values if key.endswith("_token") and not key.startswith("add_"))]
    found = {name: values[name] for name in names if name in values}
    found = {**(kind.tokens if kind is not None else {}), **found, **by_name}
    for name in dict.fromkeys((*NAMED_SPECIAL_TOKENS, *found)):
        value = found.get(name)
        if isinstance(value, str | dict) and value:
            token = value if isinstance(value, str) else _token(folder, value, special=True)
            if kind is not None and isinstance(token, str) and name in (*kind.strips_before, *kind.strips_around):
                token = AddedToken(token, lstrip=True, rstrip=name in kind.strips_around, normalized=True)
            named[name] = by_text.get(str(token), token)
    if kind is not None and kind.extra_tokens is not None and not _EXTRA_TOKENS & values.keys():
        values["extra_special_tokens"] = list(kind.extra_tokens(settings))
    unnamed = _extra_tokens(folder, values)
    return named, [token if isinstance(token, str) else _token(folder, token) for token in unnamed], added


_EXTRA_TOKENS = {"extra_special_tokens", "additional_special_tokens"}


def _pop_named(values: Json) -> Json:
    """Take extra_special_tokens if it gives names to the tokens, as multimodal models do."""
    return values.pop("extra_special_tokens") if isinstance(values.get("extra_special_tokens"), dict) else {}


def _extra_tokens(folder: Path, values: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without a name, texts or objects. Raises: ModelError."""
    found = values.get("extra_special_tokens", values.get("additional_special_tokens")) or []
    return list(_checked(folder / "tokenizer_config.json", "extra_special_tokens", found, list))


def _special_tokens_map(folder: Path, values: Mapping[str, Any]) -> Json:
    """Read special_tokens_map.json, which overrides tokenizer_config.json."""
    found = read_json(folder / "special_tokens_map.json")
    if isinstance(found.get("extra_special_tokens"), list):
        before = _extra_tokens(folder, values)
        found["extra_special_tokens"] = [
            *before,
            *(each for each in found["extra_special_tokens"] if each not in before),
        ]
    return found


def _legacy_added_tokens(folder: Path, values: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Read added_tokens.json of transformers 4: text -> id. Only a special token that is a plain text counts as one."""
    named = [values.get(name) for name in NAMED_SPECIAL_TOKENS]
    special = {token for token in (*named, *_extra_tokens(folder, values)) if isinstance(token, str)}
    path = folder / "added_tokens.json"
    return {
        _token_id(path, number): AddedToken(
            text, rstrip=False, lstrip=False, normalized=text not in special, special=text in special
        )
        for text, number in read_json(path).items()
    }


def _token(folder: Path, value: object, *, special: bool | None = None) -> AddedToken:
    """Read a token that a file writes out with its flags. Raises: ModelError."""
    written: Json = value if isinstance(value, dict) else {"content": value}
    # AddedToken reports any other key on standard output, which belongs to the process and not to a library.
    flags = {name: written[name] for name in TOKEN_FLAGS if name in written}
    if special is not None:
        flags["special"] = special
    try:
        return AddedToken(**flags)
    except TypeError as error:
        raise ModelError(f"{folder}: the tokenizer's files list {value!r}, which is not a token: {error}") from error


def _rebuild(folder: Path, document: Json, kind: TokenizerClass, values: Mapping[str, Any]) -> None:
    """Replace the pipeline of a tokenizer.json by that of its class; vocabulary, merges and post-processor stay."""
    model = _checked(folder / "tokenizer.json", "model", document.get("model") or {}, dict)
    is_bpe = kind.vocabulary == "BPE"
    if model.get("type", "BPE") != kind.vocabulary or not isinstance(model.get("vocab"), dict if is_bpe else list):
        raise ModelError(
            f"{folder / 'tokenizer.json'}: a vocabulary of type {model.get('type')}; its tokenizer_class has "
            f"{kind.vocabulary} only"
        )
    parts = kind.build({**values, CHARSMAP: _charsmap(document.get("normalizer"))})
    merges = {"merges": model.get("merges", [])} if is_bpe else {}
    document.update({**parts, "model": {**parts["model"], "vocab": model["vocab"], **merges}})
    document.update({"truncation": None, "padding": None, "added_tokens": []})
    document["post_processor"] = None if kind.drops_post_processor else document.get("post_processor")


def _charsmap(normalizer: Any) -> str | None:
    """Return SentencePiece's table of a file's normalizer; None if it has none."""
    parts = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    tables = [part.get(CHARSMAP) for part in parts if isinstance(part, dict) and part.get("type") == "Precompiled"]
    return next((table for table in tables if isinstance(table, str)), None)


def _set_template(folder: Path, inner: tokenizers.Tokenizer, parts: Sequence[str]) -> None:
    """Let the class decide about the special tokens around a text. Raises: ModelError for one that is unknown."""
    ids = {text: inner.token_to_id(text) for text in parts if text != TEXT}
    for text, token_id in ids.items():
        if token_id is None:
            raise ModelError(f"{folder / 'tokenizer.json'}: has no token {text!r}, which stands around every text")
    single = list(parts)
    inner.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=list(ids.items())
    )


def _add_tokens(
    inner: tokenizers.Tokenizer,
    added: Mapping[int, AddedToken],
    named: Mapping[str, AddedToken | str],
    extra: Iterable[AddedToken | str],
) -> None:
    """Add all tokens of the files in transformers' order, so that new ones get the same ids."""
    tokens: list[AddedToken | str] = [token for _, token in sorted(added.items())]
    known = {token.content for token in inner.get_added_tokens_decoder().values()} | {str(token) for token in tokens}
    for token in (*named.values(), *extra):
        if str(token) not in known:
            known.add(str(token))
            tokens.append(token)
    names = {str(token) for token in named.values()}
    ready = []
    for token in tokens:
        made = AddedToken(token, special=True) if isinstance(token, str) else token
        if not made.special and made.content in names:
            made.special = True
        ready.append(made)
    inner.add_tokens(ready)


def _reads_bos(folder: Path, settings: Mapping[str, Any], kind: TokenizerClass | None) -> dict[str, bool]:
    """Return add_bos_token and add_eos_token where they count: with a tokenizer.json its post-processor counts."""
    flags = (
        {} if (folder / "tokenizer.json").is_file() else {key: settings[key] for key in _BOS_FLAGS if key in settings}
    )
    if kind is not None and kind.adds_bos:
        flags["add_bos_token"] = True
    return {key: bool(value) for key, value in flags.items()}


_BOS_FLAGS = ("add_bos_token", "add_eos_token")


def _add_bos_and_eos(
    inner: tokenizers.Tokenizer,
    flags: Mapping[str, bool],
    named: Mapping[str, AddedToken | str],
) -> None:
    """Let the class decide about BOS and EOS around a prompt, if a post-processor of the file does not."""
    if not flags and inner.post_processor is not None:
        return
    wanted = {key: named.get(key.removeprefix("add_")) for key in _BOS_FLAGS if flags.get(key)}
    texts = {key: str(token) for key, token in wanted.items() if token is not None}
    bos, eos = texts.get("add_bos_token"), texts.get("add_eos_token")
    single = " ".join([*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])])
    ids = [(text, inner.token_to_id(text)) for text in dict.fromkeys(texts.values())]
    inner.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=ids)


def _apply_settings(
    folder: Path, inner: tokenizers.Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Apply the settings that change tokens, or text, of an existing tokenizer."""
    path = folder / "tokenizer_config.json"
    if settings.get("split_special_tokens"):
        inner.encode_special_tokens = True
    if settings.get("fix_mistral_regex") and _has_wrong_expression(inner, config):
        split = pre_tokenizers.Split(pattern=tokenizers.Regex(_MISTRAL_PATTERN), behavior="isolated")
        current = inner.pre_tokenizer
        if isinstance(current, pre_tokenizers.Sequence):
            current[0] = split
        else:
            if isinstance(current, pre_tokenizers.Metaspace):
                current = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            inner.pre_tokenizer = pre_tokenizers.Sequence([split, current])
    if settings.get("auto_map"):
        log_once(__name__, logging.WARNING, f"{path}: auto_map is ignored: code that comes with a model is never run")


def _cleans_up(inner: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> bool:
    """Return whether spaces before punctuation are removed. A BPE vocabulary needs one more setting for it."""
    is_asked = bool(settings.get("clean_up_tokenization_spaces"))
    is_bpe = type(inner.model).__name__ == "BPE"
    return is_asked and (not is_bpe or bool(settings.get(_CLEANS_UP_BPE)))


_CLEANS_UP_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


def _has_wrong_expression(inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> bool:
    """Return whether transformers takes this for a Mistral tokenizer that was saved before version 5."""
    if inner.get_vocab_size() <= _MISTRAL_VOCABULARY_MIN or inner.pre_tokenizer is None:
        return False
    version = str(config.get("transformers_version") or "0")
    is_old = not version.partition(".")[0].isdigit() or int(version.partition(".")[0]) < 5
    return is_old and config.get("model_type") in (None, "mistral")


def _chat_template(folder: Path, settings: Mapping[str, Any], name: str = "default") -> str | None:
    """Read a chat template of its name: files before tokenizer_config.json, as in transformers.

    There a model without further names has one text, which is the default.
    """
    is_default = name == "default"
    path = folder / ("chat_template.jinja" if is_default else f"additional_chat_templates/{name}.jinja")
    if path.is_file():
        return _read_text(path)
    template = settings.get("chat_template")
    if not is_default and not isinstance(template, list):
        return None
    if isinstance(template, list):
        entries = [
            _checked(folder / "tokenizer_config.json", "an entry of chat_template", each, dict) for each in template
        ]
        template = next((entry.get("template") for entry in entries if entry.get("name") == name), None)
    return template if isinstance(template, str) else None


def _checked(path: Path, name: str, value: Any, kind: type) -> Any:
    """Return a value of a file. Raises: ModelError unless it is an object (dict) or a list, as it should be."""
    if not isinstance(value, kind):
        raise ModelError(f"{path}: {name} is {value!r}, not {'an object' if kind is dict else 'a list'}")
    return value


def _token_id(path: Path, value: object) -> int:
    """Read a token id: a number, or its digits as a name in JSON. Raises: ModelError."""
    if (isinstance(value, int) and not isinstance(value, bool) and value >= 0) or str(value).isdecimal():
        return int(str(value))
    raise ModelError(f"{path}: {value!r} is not a token id")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not a text in UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if there is no file. Raises: ModelError naming the file."""
    if not path.is_file():
        return {}
    try:
        document = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: not a JSON object")
    return document
