"""The end of a gateway: from the first signal on it takes no calls, and open answers have a while to end.

    serving --begin--> draining --every answer has ended, or cut--> over

Draining, it still listens: calls get 503 with Retry-After and go to another gateway, and /ready says 503. What is open
when the time is over is cut: a stream with event ids says where to go on (render.resume_event), others fail in words.
"""

import asyncio
from collections.abc import Callable

from orca.gateway.errors import UNAVAILABLE, ApiError


class Drain:
    """Shared by the server, which hears the signals, and the calls."""

    def __init__(self) -> None:
        self.has_begun = False
        self.is_cut = False
        self._open: set[Callable[[], None]] = set()

    @property
    def open_answers(self) -> int:
        """Accepted calls that this gateway is answering."""
        return len(self._open)

    def begin(self, seconds: float) -> None:
        """Take no more calls, and cut what is still open after so many seconds."""
        if not self.has_begun:
            self.has_begun = True
            asyncio.get_running_loop().call_later(seconds, self.cut)

    def cut(self) -> None:
        """End every open answer now."""
        self.is_cut = True
        for close in list(self._open):
            close()

    def check(self) -> None:
        """Raises: ApiError 503 when no calls are taken any more."""
        if self.has_begun:
            raise draining_error()

    def add(self, close: Callable[[], None]) -> None:
        """An answer is open, and `close` wakes it to see that it is cut."""
        self._open.add(close)
        if self.is_cut:
            close()

    def remove(self, close: Callable[[], None]) -> None:
        self._open.discard(close)


def draining_error() -> ApiError:
    message = "this gateway is shutting down: call again, for another one or its successor"
    return ApiError(503, message, kind=UNAVAILABLE, code="gateway_draining", retry_after_s=1, closes=True)
