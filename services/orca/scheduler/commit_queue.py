"""What has been read from the stages and is not in the pool yet.

Tokens go out in one commit at a time. It takes all that is there: one step's tokens while the pool keeps up, those of
several steps when it does not, so the backlog stays as long as one call takes. Where commits have an interval, one
before it is over takes only what somebody waits for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from orca.core.domain.request import End, Token
from orca.pool.records import CommitEntry
from orca.scheduler.policy.state import GroupRequest


@dataclass(slots=True)
class _Written:
    """The tokens of one request, from `index` on, and its end."""

    index: int
    tokens: list[Token] = field(default_factory=list)
    end: End | None = None
    is_urgent: bool = False


class CommitQueue:
    """Tokens and ends on their way to the pool.

    Args:
        holds_results: keep what a request wrote until every request of its batch has ended (request-level policy).
        can_wait: asked at a request's first token and its end: whether nobody minds the interval between two commits.
    """

    def __init__(self, *, holds_results: bool, can_wait: Callable[[GroupRequest], bool]) -> None:
        self._holds_results = holds_results
        self._can_wait = can_wait
        self._ready: dict[GroupRequest, _Written] = {}
        self._held: dict[int, dict[GroupRequest, _Written]] = {}
        self._alive: dict[int, set[GroupRequest]] = {}  # batch -> its requests that have not ended

    def __len__(self) -> int:
        """Requests with something to commit now."""
        return len(self._ready)

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for any of that."""
        return any(written.is_urgent for written in self._ready.values())

    def admit(self, entry: GroupRequest) -> None:
        """A request was admitted, into its batch where the policy has such."""
        if self._holds_results:
            self._alive.setdefault(entry.batch, set()).add(entry)
            self._held.setdefault(entry.batch, {})

    def put(self, entry: GroupRequest, index: int, token: Token | None, end: End | None) -> None:
        """Add a token, an end, or both behind what the request has written so far."""
        into = self._held[entry.batch] if self._holds_results and entry.is_admitted else self._ready
        written = into.get(entry)
        if written is None:
            written = into[entry] = _Written(index)
        if token is not None:
            written.tokens.append(token)
        written.end = end
        if not written.is_urgent:
            # Somebody waits for a first token and an end, and all do for the proof that who runs alone does no harm.
            is_awaited = index == 0 or end is not None
            written.is_urgent = entry.is_alone or (is_awaited and not self._can_wait(entry))
        if end is not None:
            self._leave_batch(entry)

    def forget(self, entry: GroupRequest) -> None:
        """The request's claim is over: nothing of it will be taken any more."""
        self._ready.pop(entry, None)
        if self._holds_results and entry.is_admitted:
            self._held.get(entry.batch, {}).pop(entry, None)
            self._leave_batch(entry)

    def take(self, *, is_all: bool) -> dict[GroupRequest, CommitEntry]:
        """Everything that is ready, or what of it is urgent, in the order in which it was read."""
        if is_all:
            taken, self._ready = self._ready, {}
        else:
            taken = {entry: written for entry, written in self._ready.items() if written.is_urgent}
            for entry in taken:
                del self._ready[entry]
        return {
            entry: CommitEntry(
                request_id=entry.request.id,
                claim=entry.claim,
                index=written.index,
                tokens=tuple(written.tokens),
                end=written.end,
            )
            for entry, written in taken.items()
        }

    def _leave_batch(self, entry: GroupRequest) -> None:
        alive = self._alive.get(entry.batch)
        if alive is None or entry not in alive:
            return
        alive.remove(entry)
        if not alive:
            del self._alive[entry.batch]
            self._ready |= self._held.pop(entry.batch)
