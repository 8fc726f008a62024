"""Checks grammars before the pool stores a call: a rank would have to refuse them in the middle of a step.

A grammar passes if a matcher builds and gives its first mask, in time and within the limits of core/grammars. Both are
done in a thread, without the interpreter's lock.
"""

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

from orca.core.domain.errors import InvalidRequest, ModelError
from orca.core.domain.model import ModelInfo
from orca.core.domain.text import Tokenizer
from orca.core.grammars.matching import GrammarVocabulary
from orca.gateway.errors import UNAVAILABLE, ApiError
from orca.gateway.grammars.fields import NamedGrammar
from orca.gateway.settings import GatewaySettings

_THREADS = 2
_KEPT_MAX = 1024
"""Verdicts that are kept, by digest of the grammar."""


@dataclass(frozen=True, slots=True)
class GrammarRefusal:
    """The reason why a grammar is refused."""

    reason: str
    is_slow: bool = False  # it was not built in time, and might be another time

    def error(self, param: str) -> InvalidRequest:
        """Return the error that names a field."""
        return InvalidRequest(f"{param}: {self.reason}", param=param)


@dataclass(slots=True)
class GrammarTime:
    """The time that is left for the grammars of one call, all together. Each check takes its part of it."""

    build_s: float  # in threads
    wait_s: float  # until a thread is free


class GrammarChecker:
    """Checks the grammars of calls to one model."""

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, settings: GatewaySettings) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._settings = settings
        self._verdicts: OrderedDict[bytes, GrammarRefusal | None] = OrderedDict()
        self._free = asyncio.Semaphore(_THREADS)

    def time_of_call(self) -> GrammarTime:
        """Return the time that the grammars of one call may take."""
        most_s = self._settings.grammar_seconds_max
        return GrammarTime(build_s=most_s, wait_s=most_s)

    async def check(self, grammar: NamedGrammar, time: GrammarTime) -> None:
        """Raises: InvalidRequest that names the field; ApiError 503 while other checks take all threads."""
        refusal = await self.refusal(grammar, time)
        if refusal is not None:
            raise refusal.error(grammar.param)

    async def refusal(self, grammar: NamedGrammar, time: GrammarTime) -> GrammarRefusal | None:
        """Return why a grammar is refused; None if it passes. A known verdict takes no time.

        Raises: ApiError 503 as `check`.
        """
        encoded, most = grammar.text.encode(), self._settings.grammar_bytes_max
        if len(encoded) > most:
            return GrammarRefusal(f"makes a grammar of {len(encoded)} bytes, more than {most}")
        digest = hashlib.sha256(encoded).digest()
        if digest not in self._verdicts:
            verdict = await self._verdict(grammar, time)
            if verdict is not None and verdict.is_slow:
                return verdict
            self._verdicts[digest] = verdict
            if len(self._verdicts) > _KEPT_MAX:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(digest)
        return self._verdicts[digest]

    async def _verdict(self, grammar: NamedGrammar, time: GrammarTime) -> GrammarRefusal | None:
        """Check a grammar in a thread. A check that takes too long keeps its thread until it ends. Raises: ApiError."""
        try:
            vocabulary = await asyncio.shield(self._vocabulary)
        except ModelError as error:
            return GrammarRefusal(str(error))
        if time.build_s > 0:
            await self._take_thread(grammar.param, time)
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            check = loop.run_in_executor(self._threads, _complaint, vocabulary, grammar.text)
            check.add_done_callback(lambda _: self._free.release())
            done, _ = await asyncio.wait([check], timeout=time.build_s)
            time.build_s = time.build_s - (loop.time() - start_s) if done else 0.0
            if done:
                complaint = check.result()
                return None if complaint is None else GrammarRefusal(complaint)
        most_s = self._settings.grammar_seconds_max
        return GrammarRefusal(f"the grammar takes longer to build than {most_s:g} s; make it simpler", is_slow=True)

    async def _take_thread(self, param: str, time: GrammarTime) -> None:
        """Wait until a thread is free. Raises: ApiError 503 if none is in time."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            async with asyncio.timeout(max(time.wait_s, 0.0)):
                await self._free.acquire()
        except TimeoutError:
            message = f"{param}: cannot be checked now, other grammars take all the time"
            raise ApiError(503, message, kind=UNAVAILABLE, param=param, code="busy", retry_after_s=1) from None
        time.wait_s -= loop.time() - start_s

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="grammars")

    @cached_property
    def _vocabulary(self) -> asyncio.Future[GrammarVocabulary]:
        """The model's vocabulary, which the first call with a grammar reads, whole and for all calls."""
        tokenizer, info = self._tokenizer, self._info
        reading = partial(GrammarVocabulary, tokenizer, info.vocab_size, info.eos_token_ids)
        return asyncio.get_running_loop().run_in_executor(self._threads, reading)


def _complaint(vocabulary: GrammarVocabulary, text: str) -> str | None:
    """Return why a grammar cannot be used; None if it can."""
    matcher = vocabulary.matcher(text)
    if matcher.failure is None:
        mask = matcher.mask()
        if matcher.failure is None and not any(mask):
            return "no token of the model can begin an answer"
    return matcher.failure
