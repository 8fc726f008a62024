"""Text to token ids without holding up the process: what cannot fit is refused before it is encoded.

Encoding costs a millisecond for each few KB, so a body's worth of text would keep a thread busy for seconds, only for
its prompt to be refused by its number of tokens.
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

from orca.core.domain.model import ModelInfo
from orca.core.domain.text import Tokenizer
from orca.gateway.errors import ApiError
from orca.gateway.settings import Settings


class Encoder:
    """Encodes the texts of one model."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, settings: Settings) -> None:
        self._context = info.max_model_len
        self._tokenizer = tokenizer
        self._settings = settings
        # Half of the processors: the loop, whose streams go on meanwhile, needs one.
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    async def prompt(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt. Raises: ApiError 400 when the text cannot fit into the model's context."""
        if _may_exceed(text, self._limit_without_vocabulary):
            size, limit = _size(text), await self._limit()
            if size > limit:
                message = (
                    f"the prompt's text of {size} bytes cannot fit: the model's context of {self._context} tokens "
                    f"holds at most {limit} bytes"
                )
                raise ApiError(400, message, param=param, code="context_length_exceeded")
        return await self._encode(text, add_special_tokens)

    async def any(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text that need not fit, to count them. Raises: ApiError 400 beyond the setting's bound."""
        if _may_exceed(text, self._settings.tokenize_bytes_max):
            size, limit = _size(text), max(self._settings.tokenize_bytes_max, await self._limit())
            if size > limit:
                raise ApiError(
                    400, f"the text of {size} bytes is longer than {limit} bytes", param=param, code="text_too_long"
                )
        return await self._encode(text, add_special_tokens)

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > self._settings.inline_characters_max:
            encode = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # A call may bring many texts: streams go on between them.
        await asyncio.sleep(0)
        return ids

    @property
    def _limit_without_vocabulary(self) -> int:
        return self._context * self._settings.bytes_per_token_max

    async def _limit(self) -> int:
        """Bytes of text beyond which nothing is encoded.

        The longest token alone would be a proof for most tokenizers; but some shorten text before they part it, or
        make one token of a run of unknown characters, whence the setting as well, which is far above what text needs.
        """
        # Walks the vocabulary the first time.
        longest = await asyncio.to_thread(lambda: self._longest_token)
        return max(self._limit_without_vocabulary, self._context * longest)

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token of the vocabulary."""
        return max(len(self._tokenizer.token_bytes(token_id)) for token_id in range(self._tokenizer.vocab_size))


def _may_exceed(text: str, limit: int) -> bool:
    """Whether a text could have more bytes, without writing them: a character has four at most."""
    return len(text) * 4 > limit


def _size(text: str) -> int:
    return len(text.encode())
