"""Draining: from the first signal on a gateway takes no calls, and open answers have some time to end.

    serving --begin--> draining --every answer has ended, or cut--> over

While it drains, it still listens: calls get 503 with Retry-After and go to another gateway, and /ready answers 503.
When the time is over, open answers are cut. A stream with event ids says where to resume (render.resume_event), others
end with an error.
"""

import asyncio
from collections.abc import Callable

from orca.gateway.errors import UNAVAILABLE, ApiError


class Drain:
    """The drain state, shared by the server, which gets the signals, and the calls."""

    def __init__(self) -> None:
        self.has_begun = False
        self.is_cut = False
        self._open: set[Callable[[], None]] = set()

    @property
    def open_answers(self) -> int:
        """Number of accepted calls that this gateway is answering."""
        return len(self._open)

    def begin(self, seconds: float) -> None:
        """Stop taking calls, and after this time cut the answers that are still open."""
        if not self.has_begun:
            self.has_begun = True
            asyncio.get_running_loop().call_later(seconds, self.cut)

    def cut(self) -> None:
        """End every open answer now."""
        self.is_cut = True
        for close in list(self._open):
            close()

    def check(self) -> None:
        """Raise if no calls are taken any more. Raises: ApiError 503."""
        if self.has_begun:
            raise draining_error()

    def add(self, close: Callable[[], None]) -> None:
        """Register an open answer. Args: close: wakes the answer, which then sees `is_cut`."""
        self._open.add(close)
        if self.is_cut:
            close()

    def remove(self, close: Callable[[], None]) -> None:
        self._open.discard(close)


def draining_error() -> ApiError:
    message = "this gateway is shutting down: call again to reach another one"
    return ApiError(503, message, kind=UNAVAILABLE, code="gateway_draining", retry_after_s=1, closes=True)
