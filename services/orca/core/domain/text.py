"""Text and tokens: the model's tokenizer, and the text of an output while it grows.

`OutputText` is a pure function of the tokens of one output. The scheduler decides with it how a request ends, and any
gateway renders with it, so both see a stop string at the same token and any gateway writes the same bytes. It owns two
rules: never half a character, and nothing of a stop string.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from orca.core.domain.errors import ModelError

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one more token adds to the text that may be given out."""

    text: str  # empty while characters or a possible stop string are held back
    stop: str | None = None  # the stop string that this token completed; nothing may follow


class OutputText:
    """The text of one output, token by token, up to a stop string.

    Text that may still turn out to be the start of a stop string is held back. Of several stop strings the one that
    is complete first counts (of those, the longest), so the result does not depend on where tokens begin and end. The
    first `min_tokens` tokens end nothing: a stop string that they complete is ordinary text.

    Whoever pushes decides about EOS and stop token ids first: a token that ends the output by itself has no text and
    is not pushed.
    """

    def __init__(self, tokenizer: "Tokenizer", stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._prefixes = frozenset(text[:length] for text in stop for length in range(1, len(text)))
        self._longest_prefix = max((len(text) - 1 for text in stop), default=0)
        self._min_tokens = min_tokens
        self._count = 0
        self._held = ""

    def push(self, token_id: int) -> TextDelta:
        """Add the next token. After a delta with `stop` there is no next one."""
        self._count += 1
        new = self._detokenizer.push(token_id)
        if not self._stop:
            return TextDelta(new)
        if not new:
            return TextDelta("")
        text = self._held + new
        if self._count > self._min_tokens and (match := self._first_match(text)) is not None:
            start, stop = match
            self._held = ""
            return TextDelta(text[:start], stop)
        held = self._length_held(text)
        self._held = text[len(text) - held :]
        return TextDelta(text[: len(text) - held])

    def flush(self) -> str:
        """The output has ended without a stop string: all that was held back, once."""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Start and text of the stop string that ends first, among those that end in the newest token."""
        first: tuple[int, int, str] | None = None
        for stop in self._stop:
            # One that ended in the held text was complete within `min_tokens`: it is passed over for good.
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (first is None or (start + len(stop), start) < first[:2]):
                first = (start + len(stop), start, stop)
        return None if first is None else first[1:]

    def _length_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(len(text), self._longest_prefix), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


class Detokenizer:
    """Text of an output, token by token: the pieces joined are the output's text, special tokens left out.

    An incomplete character is held back until it is complete or cannot become one any more; then U+FFFD stands for it.
    The output is taken as the continuation of a prompt: tokenizers that mark words by a leading space keep the first.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._visible_bytes = tokenizer.visible_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._visible_bytes(token_id))

    def flush(self) -> str:
        """The output has ended: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", True)


class Tokenizer:
    """A model's tokenizer: tokenizer.json, and from tokenizer_config.json its special tokens and chat template.

    Safe to share between threads.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        decoder: Mapping[str, Any] | None,
        named_special_tokens: Mapping[str, str],
        chat_template: str | None = None,
    ) -> None:
        """
        Args:
            inner: the tokenizer itself; truncation and padding are switched off.
            decoder: the "decoder" of its tokenizer.json.
            named_special_tokens: bos_token, eos_token, ... -> text; those in the vocabulary are made special.
            chat_template: Jinja source.
        Raises: ModelError when the decoder is of a kind whose text cannot be given out token by token.
        """
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._make_special(named_special_tokens.values())
        added = inner.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._piece_bytes = _compile_decoder(decoder)
        self._bytes: dict[int, bytes] = {}
        self._visible: dict[int, bytes] = {}
        self.named_special_tokens = dict(named_special_tokens)
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read a Hugging Face folder. Raises: ModelError naming the file."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: no such file; only tokenizers in this format are served")
        try:
            source = path.read_bytes()
            document = orjson.loads(source)
            inner = tokenizers.Tokenizer.from_buffer(source)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ModelError(f"{path}: not a tokenizer: {error}") from error
        try:
            return cls(
                inner,
                decoder=document.get("decoder"),
                named_special_tokens=_named_special_tokens(folder),
                chat_template=_chat_template(folder),
            )
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's own vocabulary may be larger (padding)."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in the text count as such."""
        # The batch call, unlike the single one, lets other threads of the interpreter run meanwhile.
        ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; ids that the tokenizer does not know have none."""
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special or not; perhaps not whole characters. Empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._inner.id_to_token(token_id) if token_id >= 0 else None
            known = self._bytes[token_id] = b"" if piece is None else self._piece_bytes(piece)
        return known

    def visible_bytes(self, token_id: int) -> bytes:
        """The bytes of one token as output text has them: none for special tokens."""
        known = self._visible.get(token_id)
        if known is None:
            known = b"" if token_id in self._special_ids else self.token_bytes(token_id)
            self._visible[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        r"""One token to show to a person; one that is not whole characters as `bytes:\xe2\x82`."""
        piece = self.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _make_special(self, texts: Any) -> None:
        """Mark the named tokens of the vocabulary as special where tokenizer.json did not."""
        known = {token.content for token in self._inner.get_added_tokens_decoder().values() if token.special}
        missing = [text for text in texts if text not in known and self._inner.token_to_id(text) is not None]
        self._inner.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in missing])


def _compile_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """A function from a token's text in the vocabulary to the bytes that it stands for in the middle of an output.

    Raises: ModelError for decoders in which a token's text depends on its neighbours.
    """
    steps = _flatten(decoder)
    kinds = {step["type"] for step in steps}
    if not kinds <= {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"} or not steps:
        found = ", ".join(sorted(kinds)) or "none"
        raise ModelError(f"decoder of kind {found}; ByteLevel, Metaspace and ByteFallback are served")
    replacements = [_replacement(step) for step in steps if step["type"] in ("Metaspace", "Replace")]
    has_byte_fallback = "ByteFallback" in kinds
    is_byte_level = "ByteLevel" in kinds

    def piece_bytes(piece: str) -> bytes:
        if has_byte_fallback and (byte := _fallback_byte(piece)) is not None:
            return byte
        for old, new in replacements:
            piece = piece.replace(old, new)
        return _byte_level_bytes(piece) if is_byte_level else piece.encode()

    return piece_bytes


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if "String" not in step["pattern"]:
        raise ModelError("decoder that replaces by a regular expression")
    return step["pattern"]["String"], step["content"]


def _fallback_byte(piece: str) -> bytes | None:
    """The byte that a piece like `<0x0A>` stands for."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return None
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest for 256 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        # An added token with characters outside the alphabet stands for its own text.
        return piece.encode()


def _named_special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, ... -> text, from tokenizer_config.json, else from special_tokens_map.json."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        document = _read_json(folder / name)
        for key in NAMED_SPECIAL_TOKENS:
            value = document.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    return tokens


def _chat_template(folder: Path) -> str | None:
    """The default chat template: chat_template.jinja before the one in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is none. Raises: ModelError naming the file."""
    if not path.is_file():
        return {}
    try:
        document = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: not a JSON object")
    return document
