"""Encodes text to token ids without blocking the process; text that cannot fit is refused before.

A tokenizer may know more tokens than its model: a token was added, and the model was not resized. Text with such a
token is refused like its id.

Encoding a few KB takes a millisecond. So the text of a large body would keep a thread busy for seconds, only to be
refused for its number of tokens.
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

from orca.core.domain.errors import InvalidRequest
from orca.core.domain.model import ModelInfo
from orca.core.domain.text import Tokenizer
from orca.gateway.errors import SHORTEN_PROMPT, ApiError
from orca.gateway.settings import GatewaySettings


class Encoder:
    """Encodes the texts of one model."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, settings: GatewaySettings) -> None:
        source_max = None if info.encoder_decoder is None else info.encoder_decoder.source_positions
        self._context = info.max_model_len if source_max is None else min(info.max_model_len, source_max)
        self._vocab_size = info.vocab_size
        self._tokenizer = tokenizer
        self._settings = settings
        # Half of the CPUs: the event loop, whose streams go on meanwhile, needs one.
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    async def encode_prompt(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        """Encode a prompt.

        Raises: ApiError 400 if the text cannot fit into the model's context; InvalidRequest if the model has no row for
            one of its tokens.
        """
        if _may_exceed(text, self._limit_without_vocabulary):
            size, limit = _size(text), await self._limit()
            if size > limit:
                raise _text_error(self._context, size, limit, param)
        return await self._encode(text, add_special_tokens, param)

    async def encode_text(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        """Encode a text that need not fit, to count its tokens.

        Raises: ApiError 400 beyond the setting's limit; InvalidRequest as `encode_prompt`.
        """
        if _may_exceed(text, self._settings.tokenize_bytes_max):
            size, limit = _size(text), max(self._settings.tokenize_bytes_max, await self._limit())
            if size > limit:
                raise ApiError(
                    400, f"the text of {size} bytes is longer than {limit} bytes", param=param, code="text_too_long"
                )
        return await self._encode(text, add_special_tokens, param)

    async def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        encode = partial(self._encode_known, text, add_special_tokens, param)
        if len(text) > self._settings.inline_characters_max:
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        ids = encode()
        # A call may have many texts: let streams go on between them.
        await asyncio.sleep(0)
        return ids

    def _encode_known(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Encode a text. Raises: InvalidRequest if the model has no row for one of its tokens."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if ids and max(ids) >= self._vocab_size:
            unknown = next(token_id for token_id in ids if token_id >= self._vocab_size)
            raise InvalidRequest(
                f"{param}: has the token {self._tokenizer.token_text(unknown)!r} with id {unknown}, "
                f"and the model knows only ids from 0 to {self._vocab_size - 1}",
                param=param,
            )
        return ids

    @property
    def _limit_without_vocabulary(self) -> int:
        return self._context * self._settings.bytes_per_token_max

    async def _limit(self) -> int:
        """Return the most bytes of text that are encoded.

        For most tokenizers the longest token alone gives a safe limit. Some tokenizers shorten text before they split
        it, or make one token of a run of unknown characters. So the setting, far above what text needs, counts too.
        """
        # The first call reads the whole vocabulary.
        longest = await asyncio.to_thread(lambda: self._longest_token)
        return max(self._limit_without_vocabulary, self._context * longest)

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the vocabulary's longest token."""
        return max(len(self._tokenizer.token_bytes(token_id)) for token_id in range(self._tokenizer.vocab_size))


def _text_error(context: int, size: int, limit: int, param: str) -> ApiError:
    has, shorten = (
        ("your decoder_prefix has", "Please shorten decoder_prefix. (context_length_exceeded)")
        if param == "decoder_prefix"
        else ("your messages have", SHORTEN_PROMPT)
    )
    message = (
        f"This model's maximum context length is {context} tokens. However, {has} {size} bytes of text, and at most "
        f"{limit} bytes can fit. {shorten}"
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _may_exceed(text: str, limit: int) -> bool:
    """Return whether a text could have more bytes, without encoding it: a character has at most four."""
    return len(text) * 4 > limit


def _size(text: str) -> int:
    return len(text.encode())
