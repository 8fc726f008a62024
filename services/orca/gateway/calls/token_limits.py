"""Limits on the tokens that a call's answers may have: `allowed_token_ids` and `bad_words`, with vLLM's meaning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca.core.domain.errors import InvalidRequest
from orca.gateway.calls.bodies import GenerationBody
from orca.gateway.calls.token_ids import check_token_ids
from orca.gateway.models.models import ServedModel
from orca.gateway.settings import GatewaySettings

_ALLOWED, _WORDS = "allowed_token_ids", "bad_words"

FIELDS: Mapping[str, str] = {"forbidden_token_ids": _WORDS, "forbidden_sequences": _WORDS}
"""Sampling parameters -> the field of a call that they are made from, where its name is another one."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Limits of every answer of a call."""

    allowed: tuple[int, ...] = ()  # no other token is drawn; empty allows all
    forbidden: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()  # forbidden, of two tokens or more

    def sampling(self) -> dict[str, Any]:
        """Return the limits as SamplingParams has them."""
        return {
            "allowed_token_ids": self.allowed,
            "forbidden_token_ids": self.forbidden,
            "forbidden_sequences": self.sequences,
        }


NO_LIMITS = TokenLimits()


async def token_limits(body: GenerationBody, model: ServedModel, settings: GatewaySettings) -> TokenLimits:
    """Return the limits of a call. Raises: InvalidRequest, ApiError."""
    if body.allowed_token_ids is None and not body.bad_words:
        return NO_LIMITS
    allowed = _allowed(body.allowed_token_ids, model, settings)
    words = await _word_tokens(body.bad_words or (), model, settings)
    forbidden = tuple(dict.fromkeys(ids[0] for ids in words if len(ids) == 1))
    if allowed and set(allowed) <= set(forbidden):
        raise InvalidRequest(f"{_WORDS}: forbid every token of {_ALLOWED}", param=_WORDS)
    return TokenLimits(allowed, forbidden, tuple(dict.fromkeys(ids for ids in words if len(ids) > 1)))


def _allowed(ids: Sequence[int] | None, model: ServedModel, settings: GatewaySettings) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not ids:
        raise InvalidRequest(f"{_ALLOWED}: must have at least one token id", param=_ALLOWED)
    if len(ids) > settings.allowed_token_ids_max:
        message = f"{_ALLOWED}: has {len(ids)} token ids, more than {settings.allowed_token_ids_max}"
        raise InvalidRequest(message, param=_ALLOWED)
    check_token_ids(ids, model.info.vocab_size, param=_ALLOWED)
    return tuple(dict.fromkeys(ids))


async def _word_tokens(
    words: Sequence[str], model: ServedModel, settings: GatewaySettings
) -> Sequence[tuple[int, ...]]:
    """Return the tokens of each word, as the first word of a text and after a space.

    vLLM leaves the second ones out if they are not as many as the first ones. Then the word can still be drawn.
    """
    if len(words) > settings.bad_words_max:
        raise InvalidRequest(f"{_WORDS}: has {len(words)} texts, more than {settings.bad_words_max}", param=_WORDS)
    found = []
    for i, word in enumerate(words):
        param = f"{_WORDS}[{i}]"
        if not 1 <= len(word) <= settings.bad_word_characters_max:
            message = f"{param}: must have 1 to {settings.bad_word_characters_max} characters, not {len(word)}"
            raise InvalidRequest(message, param=param)
        rest = word.lstrip()
        for text in (rest, f" {rest}") if rest else (word,):
            ids = await model.encoder.encode_text(text, param=param, add_special_tokens=False)
            if not ids:
                raise InvalidRequest(f"{param}: has no tokens", param=param)
            found.append(tuple(ids))
    return found
