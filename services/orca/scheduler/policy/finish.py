"""How a request ends by its tokens: EOS, stop token ids, stop strings, length. Cancel and deadline are the pool's.

A token that ends the request is the last one of its log; the end goes into the pool in one write with it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from orca.core.domain.request import End, FinishReason, Request, Token


class StopStringMatch(Protocol):
    """What `core.domain.text.OutputText.push` answers, as far as it matters here."""

    @property
    def stop(self) -> str | None: ...


class StopStringMatcher(Protocol):
    """The growing text of an output; `core.domain.text.OutputText` is one."""

    def push(self, token_id: int, /) -> StopStringMatch: ...


MakeStopStringMatcher = Callable[[Request], StopStringMatcher]


class FinishDetector:
    """Watches the tokens of one request.

    Args:
        eos_token_ids: of the model.
        make_stop_string_matcher: called for requests with stop strings only: detokenizing costs time on the master.
    """

    __slots__ = ("_eos", "_request", "_stop_ids", "_text", "count")

    def __init__(
        self, request: Request, eos_token_ids: Sequence[int], make_stop_string_matcher: MakeStopStringMatcher | None
    ) -> None:
        sampling = request.sampling
        self._request = request
        self._eos = () if sampling.ignore_eos else eos_token_ids
        self._stop_ids = sampling.stop_token_ids
        self._text: StopStringMatcher | None = None
        if sampling.stop:
            assert make_stop_string_matcher is not None, "a request with stop strings needs a tokenizer"
            self._text = make_stop_string_matcher(request)
        self.count = 0  # tokens seen

    def push(self, token_id: int) -> End | None:
        """Take the next token. Returns: the end that it brings, None when the request goes on.

        With min_tokens = m the first m tokens end nothing by themselves (the stages do not draw EOS there either);
        stop strings keep their own count of them.
        """
        index, self.count = self.count, self.count + 1
        if index >= self._request.sampling.min_tokens:
            if token_id in self._eos:
                return End(FinishReason.STOP, self.count)
            if token_id in self._stop_ids:
                return End(FinishReason.STOP, self.count, token_id)
        if self._text is not None and (stop := self._text.push(token_id).stop) is not None:
            return End(FinishReason.STOP, self.count, stop)
        if self.count == self._request.max_new_tokens:
            return End(FinishReason.LENGTH, self.count)
        return None

    def replay(self, log: Sequence[Token]) -> End | None:
        """Take the tokens that a request brings from earlier claims. Returns: the end, if they already hold it.

        Where a scheduler of another release saw none there and went on, the end is behind what it wrote: clients have
        that, and a log never becomes shorter.
        """
        for token in log:
            if (end := self.push(token.id)) is not None:
                return end if end.count == len(log) else End(end.reason, len(log))
        return None
