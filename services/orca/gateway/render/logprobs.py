"""Log probabilities in OpenAI's two shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orca.core.domain.request import Logprob
from orca.core.domain.text import Detokenizer, Tokenizer

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

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._offset = 0

    def score(self, token_id: int, logprob: Logprob | None) -> ScoredToken:
        scored = ScoredToken(token_id, logprob, max(self._offset, 0))
        self._offset += len(self._detokenizer.push(token_id))
        return scored

    def score_prompt(self, prompt: Sequence[int], logprobs: Sequence[Logprob], text: str) -> list[ScoredToken]:
        """Score the tokens of a prompt that is echoed as `text`. Args: logprobs: of tokens 1 and up."""
        # The echoed text may lack the leading space of the first token.
        self._offset = len(text) - len(_joined(prompt, self._tokenizer))
        known: list[Logprob | None] = [None, *logprobs]
        scored = [self.score(token_id, logprob) for token_id, logprob in zip(prompt, known, strict=False)]
        self._detokenizer = Detokenizer(self._tokenizer)
        self._offset = len(text)
        return scored


def _joined(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join(detokenizer.push(token_id) for token_id in tokens) + detokenizer.flush()


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


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
