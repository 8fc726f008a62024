"""The end of a request by its tokens: EOS, stop token ids, stop strings, length. Cancel and deadline are the pool's.

A token that ends the request is the last one of its log; the end goes into the pool in one write with it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from orca.core.domain.request import End, EndingTokens, FinishReason, Request, Token


class StopStringMatch(Protocol):
    """The part of `core.domain.text.TextDelta` that is needed here."""

    @property
    def stop(self) -> str | None: ...


class StopStringMatcher(Protocol):
    """Finds stop strings in the growing text of an output, as `core.domain.text.OutputText` does."""

    def push(self, token_id: int, /) -> StopStringMatch: ...


MakeStopStringMatcher = Callable[[Request], StopStringMatcher]


class FinishDetector:
    """Decides after each token of one request whether the request ends.

    Args:
        eos_token_ids: of the model.
        make_stop_string_matcher: called only for requests with stop strings: detokenizing costs time on the master.
        forces_last_token: the model forces the last token of a log of full length (`forced_eos_token_id`). Nothing
            chose this token, so its request ends by its length.
    """

    __slots__ = ("_ending", "_forced_count", "_request", "_stop_strings", "count")

    def __init__(
        self,
        request: Request,
        eos_token_ids: Sequence[int],
        make_stop_string_matcher: MakeStopStringMatcher | None,
        *,
        forces_last_token: bool = False,
    ) -> None:
        sampling = request.sampling
        self._request = request
        self._ending = EndingTokens.of(sampling, eos_token_ids)
        self._forced_count = request.max_new_tokens if forces_last_token else None
        self._stop_strings: StopStringMatcher | None = None
        if sampling.stop:
            assert make_stop_string_matcher is not None, "a request with stop strings needs a tokenizer"
            self._stop_strings = make_stop_string_matcher(request)
        self.count = 0  # tokens seen

    def push(self, token_id: int) -> End | None:
        """Take the next token. Returns: the end that it causes, None if the request goes on.

        With min_tokens = m the first m tokens end nothing by themselves (the stages do not draw EOS there either);
        stop strings keep their own count of them.
        """
        index, self.count = self.count, self.count + 1
        if self._ending.ends(token_id, index):
            if self.count == self._forced_count:
                return End(FinishReason.LENGTH, self.count)
            return End(FinishReason.STOP, self.count, None if token_id in self._ending.eos else token_id)
        if self._stop_strings is not None and (stop := self._stop_strings.push(token_id).stop) is not None:
            return End(FinishReason.STOP, self.count, stop)
        if self.count == self._request.max_new_tokens:
            return End(FinishReason.LENGTH, self.count)
        return None

    def replay(self, log: Sequence[Token]) -> End | None:
        """Take the tokens that earlier claims have logged. Returns: the end, if the log already holds it.

        A scheduler of another release may have seen no end there and gone on. Then the end comes after all that it
        wrote: clients have those tokens, and a log never becomes shorter.
        """
        for token in log:
            if (end := self.push(token.id)) is not None:
                return end if end.count == len(log) else End(end.reason, len(log))
        return None
