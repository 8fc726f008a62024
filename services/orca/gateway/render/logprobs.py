"""Log probabilities in OpenAI's two shapes, and those of a prompt in vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orca.core.domain.request import Logprob, Request
from orca.core.domain.text import Detokenizer, Tokenizer
from orca.gateway.render.shown_text import SpecialDetokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the answer with its log probability."""

    token: int
    logprob: Logprob | None  # None for the first token of an echoed prompt, which nothing precedes
    offset: int  # characters of the answer before it, including text that is held back


class Scorer:
    """Finds where in the answer each token's text begins; inside a character, that is where the character begins."""

    def __init__(self, tokenizer: Tokenizer, request: Request, *, shows_special: bool = False) -> None:
        """Args: shows_special: the text has that of special tokens."""
        self._tokenizer = tokenizer
        make = SpecialDetokenizer if shows_special else Detokenizer.of
        self._detokenizer: Detokenizer | SpecialDetokenizer = make(tokenizer, request)
        self._offset = 0

    def score(self, token_id: int, logprob: Logprob | None) -> ScoredToken:
        scored = ScoredToken(token_id, logprob, max(self._offset, 0))
        self._offset += len(self._detokenizer.push(token_id))
        return scored

    def score_prompt(self, prompt: Sequence[int], logprobs: Sequence[Logprob], text: str) -> list[ScoredToken]:
        """Score the tokens of a prompt that is echoed as `text`. Args: logprobs: of tokens 1 and up."""
        self._offset = len(text)
        known: list[Logprob | None] = [None, *logprobs]
        offsets = _prompt_offsets(prompt, text, self._tokenizer)
        return [
            ScoredToken(token_id, logprob, offset)
            for token_id, logprob, offset in zip(prompt, known, offsets, strict=False)
        ]


def _prompt_offsets(prompt: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return where each token of a prompt begins in its text.

    The text may lack special tokens that the tokenizer has added, and the leading space of the first word.
    """
    detokenizer = Detokenizer(tokenizer, shows_special=True)
    starts, pieces, position = [], [], 0
    for token_id in prompt:
        starts.append(position)
        pieces.append(detokenizer.push(token_id))
        position += len(pieces[-1])
    joined = "".join(pieces) + detokenizer.flush()
    skipped = _characters_before(text, joined, prompt, starts, tokenizer)
    if skipped is None:
        # The tokenizer has changed the text, by lower case for instance.
        offsets = tokenizer.character_offsets(text, prompt)
        if offsets is not None:
            return offsets
        skipped = len(joined) - len(text)
    return [min(max(start - skipped, 0), len(text)) for start in starts]


def _characters_before(
    text: str, joined: str, prompt: Sequence[int], starts: Sequence[int], tokenizer: Tokenizer
) -> int | None:
    """Return how much of the joined tokens stands before the prompt's text; None if they do not have this text."""
    if joined == text:
        return 0
    found = None
    for token_id, start in zip(prompt, starts, strict=True):
        for skipped in (start, start + 1) if joined.startswith(" ", start) else (start,):
            if joined.startswith(text, skipped):
                found = skipped
        if not tokenizer.is_special(token_id):
            break
    return found


def completion_logprobs(scored: Sequence[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the parallel lists of /v1/completions."""
    return {
        "text_offset": [entry.offset for entry in scored],
        "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob.logprob) for entry in scored],
        "tokens": [tokenizer.token_text(entry.token) for entry in scored],
        "top_logprobs": [_top_by_text(entry.logprob, tokenizer) for entry in scored],
    }


def _top_by_text(logprob: Logprob | None, tokenizer: Tokenizer) -> dict[str, float] | None:
    """Return the alternatives, and the token itself even if it is not one of them."""
    if logprob is None:
        return None
    top = (*logprob.top, (logprob.token, logprob.logprob))
    by_text: dict[str, float] = {}
    for token_id, value in top:
        by_text.setdefault(tokenizer.token_text(token_id), _finite(value))
    return by_text


def chat_logprobs(scored: Sequence[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the list of tokens with their alternatives of /v1/chat/completions."""
    content = []
    for entry in scored:
        if entry.logprob is None:
            continue
        top = [_chat_token(token_id, value, tokenizer) for token_id, value in entry.logprob.top]
        content.append(_chat_token(entry.token, entry.logprob.logprob, tokenizer) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[Logprob], top: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """Return vLLM's list: an object for each token of a prompt, null for the first, which nothing precedes.

    An object has the token and its most likely alternatives by their ids. The rank of a token that is not among the
    alternatives is not in the log: it is null.

    Args:
        logprobs: of tokens 1 and up.
        top: alternatives to report; the log may have more.
    """
    return [None, *(_by_id(logprob, top, tokenizer) for logprob in logprobs[: len(prompt) - 1])]


def _by_id(logprob: Logprob, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprob.top, start=1)}
    entries = {logprob.token: logprob.logprob} | dict(logprob.top[:top])
    return {
        str(token_id): {
            "logprob": _finite(value),
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, value in entries.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
