"""Text and tokens: the model's tokenizer, and the text of an output while it grows.

`OutputText` is a pure function of the tokens of one output. The scheduler uses it to decide how a request ends, and any
gateway renders with it. So both see a stop string at the same token, and any gateway writes the same bytes. It enforces
two rules: no half characters, and nothing of a stop string.
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from orca.core.domain.errors import ModelError
from orca.core.domain.request import Request
from orca.core.domain.special_stops import SpecialStop, SpecialStops
from orca.core.domain.text_clean_up import CleanUp, clean_up
from orca.core.domain.tokenizer_class import byte_level_alphabet
from orca.core.domain.tokenizer_folder import read_tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that one more token makes available."""

    text: str  # empty while characters or a possible stop string are held back
    stop: str | None = None  # the stop string that this token completed; nothing follows
    special: int = 0  # special tokens that the stop string stands for


class OutputText:
    """The text of one output, token by token, up to a stop string.

    Text that may still turn out to be the start of a stop string is held back. Of several stop strings the one that
    is complete first counts (of those, the longest), so the result does not depend on where tokens begin and end. The
    first `min_tokens` tokens end nothing: a stop string that they complete is ordinary text. A special token has no
    text, but its text in a stop string stands for the token, too.

    The caller decides about EOS and stop token ids first: a token that ends the output by itself has no text and is not
    pushed.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        beginning: Sequence[int] = (),
        is_exact: bool = False,
    ) -> None:
        """Args: beginning, is_exact: as for `Detokenizer`."""
        self._detokenizer = Detokenizer(tokenizer, beginning=beginning, is_exact=is_exact)
        self._stop = tuple(stop)
        self._prefixes = frozenset(text[:length] for text in stop for length in range(1, len(text)))
        self._longest_prefix = max((len(text) - 1 for text in stop), default=0)
        self._special = SpecialStops.among(stop, tokenizer.special_pattern, tokenizer.special_ids) if stop else None
        self._min_tokens = min_tokens
        self._count = 0
        self._held = ""

    @classmethod
    def of(cls, tokenizer: "Tokenizer", request: Request) -> "OutputText":
        """Return the text of a request's output."""
        return cls(tokenizer, request.sampling.stop, request.sampling.min_tokens, **_way_of_writing(request))

    def push(self, token_id: int) -> TextDelta:
        """Add the next token. After a delta with `stop` no token follows."""
        self._count += 1
        new = self._detokenizer.push(token_id)
        if not self._stop:
            return TextDelta(new)
        special = (
            None
            if self._special is None
            else self._special.push(token_id, new, cuts_character=self._detokenizer.is_inside_character)
        )
        if not new and special is None:
            return TextDelta("")
        text = self._held + new
        if self._count > self._min_tokens and (match := self._first_match(text, special)) is not None:
            start, stop, special_count = match
            self._held = ""
            # A character that a special token cuts off stays incomplete, as before any other end.
            cut = self._detokenizer.flush() if special is not None and start == len(text) else ""
            return TextDelta(text[:start] + cut, stop, special_count)
        held = self._length_held(text)
        if self._special is not None:
            held = max(held, self._special.held)
        self._held = text[len(text) - held :]
        return TextDelta(text[: len(text) - held])

    @property
    def held(self) -> int:
        """Whole characters that are held back."""
        return len(self._held)

    @property
    def held_special(self) -> int:
        """The last special tokens that may belong to a stop string."""
        return 0 if self._special is None else self._special.held_special

    def end_with(self, token_id: int) -> str:
        """Return all that was held back, and the text of a token that ends the output by itself."""
        text = self._held + self._detokenizer.push(token_id) + self._detokenizer.flush()
        self._held = ""
        return text

    def flush(self) -> str:
        """Return all that was held back, when the output has ended without a stop string."""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        return text

    def _first_match(self, text: str, special: SpecialStop | None) -> tuple[int, str, int] | None:
        """Return start, text and special tokens of the stop string that ends first, of those that end in the newest
        token.
        """
        first: tuple[int, int, str, int] | None = None
        if special is not None:
            end = len(text) - special.after
            first = (end, end - special.characters, special.stop, special.special)
        for stop in self._stop:
            # A stop string that ended in the held text was complete within `min_tokens`: it is skipped for good.
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (first is None or (start + len(stop), start) < first[:2]):
                first = (start + len(stop), start, stop, 0)
        return None if first is None else first[1:]

    def _length_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that a stop string begins with."""
        for length in range(min(len(text), self._longest_prefix), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


class Detokenizer:
    """Turns the tokens of an output into text, piece by piece; special tokens have none unless they are asked for.

    An incomplete character is held back until it is complete. If it cannot become complete, U+FFFD replaces it.
    If the output continues a prompt or words that its call gave, tokenizers that mark words by a leading space keep the
    first. Otherwise the output of an encoder-decoder model is a text of its own: it begins as `decode` lets a text
    begin.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        beginning: Sequence[int] = (),
        shows_special: bool = False,
        is_exact: bool = False,
    ) -> None:
        """
        Args:
            beginning: of the target before its log, with an encoder-decoder model.
            is_exact: the text is the bytes of the tokens, one after the other.
        """
        is_exact |= shows_special
        self._token_bytes = tokenizer.token_bytes if shows_special else tokenizer.visible_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore" if tokenizer.is_bytes else "replace")
        is_text_start = not is_exact and _begins_text(tokenizer, beginning)
        self._tokenizer = tokenizer if is_text_start else None  # None after the first visible token
        self._strips = tokenizer.text_start.strips if is_text_start else 0
        self._stripped = tokenizer.text_start.character
        self._clean_up = CleanUp() if tokenizer.cleans_up and not is_exact else None

    @classmethod
    def of(cls, tokenizer: "Tokenizer", request: Request) -> "Detokenizer":
        """Return the detokenizer of a request's output."""
        return cls(tokenizer, **_way_of_writing(request))

    def push(self, token_id: int) -> str:
        if self._tokenizer is None:
            text = self._decoder.decode(self._token_bytes(token_id))
        else:
            text = self._decoder.decode(self._first_bytes(token_id, self._tokenizer))
        if self._strips and text:
            text = self._strip(text)
        return text if self._clean_up is None else self._clean_up.push(text)

    @property
    def is_inside_character(self) -> bool:
        """True while an incomplete character is held back."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Return what was held back when the output ended: U+FFFD for an incomplete character."""
        text = self._decoder.decode(b"", True)
        return text if self._clean_up is None else self._clean_up.push(text) + self._clean_up.flush()

    def _first_bytes(self, token_id: int, tokenizer: "Tokenizer") -> bytes:
        if not tokenizer.is_visible(token_id):
            return b""
        self._tokenizer = None
        return tokenizer.first_bytes(token_id)

    def _strip(self, text: str) -> str:
        """Remove characters at the start of the whole text."""
        while self._strips and text.startswith(self._stripped):
            text = text[1:]
            self._strips -= 1
        if text:
            self._strips = 0
        return text


def _way_of_writing(request: Request) -> dict[str, Any]:
    """Return the settings of a detokenizer for a request's output. What a grammar has matched is not changed."""
    return {"beginning": request.decoder_prefix, "is_exact": request.sampling.grammar is not None}


def _begins_text(tokenizer: "Tokenizer", beginning: Sequence[int]) -> bool:
    """Return whether an output is a text of its own, and not the rest of one.

    The start token and a language token are no text, but words in a `decoder_prefix` are.

    Args: beginning: of the target before its log, start token first; empty with a decoder-only model.
    """
    return not tokenizer.continues_prompts and not any(map(tokenizer.is_visible, beginning[1:]))


class Tokenizer:
    """A model's tokenizer: that of AutoTokenizer (tokenizer_folder.py), with its special tokens and chat template.

    Threads may share it.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        decoder: Mapping[str, Any] | None,
        named_special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        tool_template: str | None = None,
        response_template: Any = None,
        continues_prompts: bool = True,
        cleans_up: bool = False,
        is_bytes: bool = False,
    ) -> None:
        """
        Args:
            inner: the tokenizer of the `tokenizers` library; truncation and padding are switched off.
            decoder: the "decoder" of its tokenizer.json.
            named_special_tokens: bos_token, eos_token, ... -> text.
            chat_template: Jinja source.
            tool_template: the same, for chats with tools, where it is another one.
            response_template: JSON that says how an answer is divided, as the files have it; None without one.
            continues_prompts: an output continues the text of its prompt; False for an encoder-decoder model.
            cleans_up: an output has no space before punctuation (text_clean_up.py).
            is_bytes: each token is a byte; those that make no character are left out, and EOS is never added twice.
        Raises: ModelError for a kind of decoder whose text cannot be written token by token.
        """
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._piece_bytes, self.text_start = _compile_decoder(decoder)
        self._bytes: dict[int, bytes] = {}
        self._visible: dict[int, bytes] = {}
        self.named_special_tokens = dict(named_special_tokens)
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.response_template = response_template
        self.continues_prompts = continues_prompts
        self.cleans_up = cleans_up
        self.is_bytes = is_bytes

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read a Hugging Face folder. Raises: ModelError naming the file."""
        folder = Path(folder)
        found = read_tokenizer(folder)
        try:
            return cls(
                found.inner,
                decoder=found.decoder,
                named_special_tokens=found.special_tokens,
                chat_template=found.chat_template,
                tool_template=found.tool_template,
                response_template=found.response_template,
                continues_prompts=found.continues_prompts,
                cleans_up=found.cleans_up,
                is_bytes=found.is_bytes,
            )
        except ModelError as error:
            raise ModelError(f"{folder / 'tokenizer.json'}: {error}") from error

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Text -> id of the special tokens, which have no text in an output."""
        added = self._inner.get_added_tokens_decoder()
        return {added[token_id].content: token_id for token_id in self._special_ids if added[token_id].content}

    @cached_property
    def special_pattern(self) -> "re.Pattern[str] | None":
        """A pattern of the special tokens' texts, the longest first; None if there are none."""
        texts = sorted(self.special_ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones. The model's own vocabulary may be larger (padding)."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def ids_from(self, first: int) -> dict[int, str]:
        """Return the tokens from an id on, in order of their ids. It reads the whole vocabulary."""
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        return dict(sorted((token_id, text) for text, token_id in vocabulary.items() if token_id >= first))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens that are written out in the text count as such."""
        # Unlike the call for one text, the batch call lets other threads of the interpreter run meanwhile.
        ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if self.is_bytes and add_special_tokens and len(ids) > 1 and ids[-1] == ids[-2] and self.is_special(ids[-1]):
            ids.pop()
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Ids that the tokenizer does not know have no text."""
        if self.is_bytes:
            shown = self.visible_bytes if skip_special_tokens else self.token_bytes
            return b"".join(map(shown, ids)).decode(errors="ignore")
        # The batch call lets other threads run, as in `encode`.
        text: str = self._inner.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return clean_up(text) if self.cleans_up and skip_special_tokens else text

    def is_special(self, token_id: int) -> bool:
        """Return whether a token has no text in an output."""
        return token_id in self._special_ids

    def character_offsets(self, text: str, ids: Sequence[int]) -> list[int] | None:
        """Return where in `text` each of its tokens begins; None if `ids` are not the tokens of this text."""
        for adds in (True, False):
            # The batch call lets other threads run, as in `encode`; the fast one has no offsets.
            encoded = self._inner.encode_batch([text], add_special_tokens=adds)[0]
            if encoded.ids == list(ids):
                return [start for start, _ in encoded.offsets]
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not; perhaps not whole characters. Empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._inner.id_to_token(token_id) if token_id >= 0 else None
            known = self._bytes[token_id] = b"" if piece is None else self._piece_bytes(piece)
        return known

    def visible_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to an output: none for special tokens."""
        known = self._visible.get(token_id)
        if known is None:
            known = b"" if token_id in self._special_ids else self.token_bytes(token_id)
            self._visible[token_id] = known
        return known

    def is_visible(self, token_id: int) -> bool:
        """Return whether `decode` shows a token: it is known, and not special."""
        return token_id not in self._special_ids and token_id >= 0 and self._inner.id_to_token(token_id) is not None

    def first_bytes(self, token_id: int) -> bytes:
        """Return the bytes of the first visible token of a text that continues nothing."""
        piece = self._inner.id_to_token(token_id)
        assert piece is not None, "the token is visible"
        return self.text_start.piece_bytes(piece)

    def token_text(self, token_id: int) -> str:
        r"""Return one token for a person to read; incomplete characters are written as `bytes:\xe2\x82`."""
        piece = self.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


PieceBytes = Callable[[str], bytes]
"""Turns a token's text in the vocabulary into the bytes that it stands for."""


@dataclass(frozen=True, slots=True)
class TextStart:
    """The way in which `decode` writes the start of a text that continues nothing."""

    piece_bytes: PieceBytes  # of the first token
    character: str = " "
    strips: int = 0  # most of these characters that are removed from the start of the whole text


def _compile_decoder(decoder: Mapping[str, Any] | None) -> tuple[PieceBytes, TextStart]:
    """Return the bytes of tokens inside an output, and the start of one.

    Raises: ModelError for decoders in which a token's text depends on its neighbours.
    """
    steps = _flatten(decoder)
    kinds = {step["type"] for step in steps}
    if not kinds <= {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"} or not steps:
        found = ", ".join(sorted(kinds)) or "none"
        raise ModelError(f"decoder of kind {found}; only ByteLevel, Metaspace and ByteFallback are served")
    inside = [_replacement(step) for step in steps if step["type"] in ("Metaspace", "Replace")]
    first = [_replacement(step, is_first=True) for step in steps if step["type"] in ("Metaspace", "Replace")]
    # Before Fuse it would change each token.
    nothing: Mapping[str, Any] = {"content": " ", "start": 0}
    strip = next((step for step in steps if step["type"] == "Strip"), nothing)
    start = TextStart(_pieces(kinds, first), strip["content"], strip["start"])
    return _pieces(kinds, inside), start


def _pieces(kinds: Set[str], replacements: Sequence[tuple[str, str]]) -> PieceBytes:
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


def _replacement(step: Mapping[str, Any], *, is_first: bool = False) -> tuple[str, str]:
    """Return old and new text. Args: is_first: in the first token of a text that continues nothing."""
    if step["type"] == "Metaspace":
        # Files of older releases have only `add_prefix_space`.
        scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
        return step["replacement"], "" if is_first and scheme != "never" else " "
    if "String" not in step["pattern"]:
        raise ModelError("the decoder replaces by a regular expression, which is not supported")
    return step["pattern"]["String"], step["content"]


def _fallback_byte(piece: str) -> bytes | None:
    """Return the byte that a piece like `<0x0A>` stands for."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return None
    return None


_ALPHABET = byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        # An added token with characters outside the alphabet stands for its own text.
        return piece.encode()
