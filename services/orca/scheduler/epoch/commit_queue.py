"""Tokens and ends that have been read from the stages and are not in the pool yet.

They go out in one commit at a time. A commit takes all that is there: one step's tokens while the pool keeps up, those
of several steps when it does not. So the backlog is never longer than one call takes. If commits have an interval, a
commit before its end takes only what somebody waits for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from orca.core.domain.request import End, Token
from orca.pool.records import CommitEntry
from orca.scheduler.policy.batch import GroupRequest


@dataclass(slots=True)
class _RequestOutput:
    """The uncommitted tokens of one request, from `index` on, and its end."""

    index: int
    tokens: list[Token] = field(default_factory=list)
    end: End | None = None
    is_urgent: bool = False


class CommitQueue:
    """Tokens and ends on their way to the pool.

    Args:
        holds_results: keep a request's output until every request of its batch has ended (request-level policy).
        can_wait: called at a request's first token and its end: true if they may wait for the interval between commits.
    """

    def __init__(self, *, holds_results: bool, can_wait: Callable[[GroupRequest], bool]) -> None:
        self._holds_results = holds_results
        self._can_wait = can_wait
        self._ready: dict[GroupRequest, _RequestOutput] = {}
        self._held: dict[int, dict[GroupRequest, _RequestOutput]] = {}
        self._alive: dict[int, set[GroupRequest]] = {}  # batch -> its requests that have not ended

    def __len__(self) -> int:
        """Return the number of requests with output to commit now."""
        return len(self._ready)

    @property
    def is_urgent(self) -> bool:
        """True if somebody waits for any output that is ready."""
        return any(output.is_urgent for output in self._ready.values())

    def admit(self, entry: GroupRequest) -> None:
        """Add an admitted request to its batch, if the policy has batches."""
        if self._holds_results:
            self._alive.setdefault(entry.batch, set()).add(entry)
            self._held.setdefault(entry.batch, {})

    def put(self, entry: GroupRequest, index: int, token: Token | None, end: End | None) -> None:
        """Add a token, an end, or both after the request's earlier output."""
        outputs = self._held[entry.batch] if self._holds_results and entry.is_admitted else self._ready
        output = outputs.get(entry)
        if output is None:
            output = outputs[entry] = _RequestOutput(index)
        if token is not None:
            output.tokens.append(token)
        output.end = end
        if not output.is_urgent:
            # Its client waits for a first token and an end. If it runs alone, all requests wait for its first commit,
            # which proves that it does no harm.
            is_awaited = index == 0 or end is not None
            output.is_urgent = entry.is_alone or (is_awaited and not self._can_wait(entry))
        if end is not None:
            self._leave_batch(entry)

    def forget(self, entry: GroupRequest) -> None:
        """Drop the request's output: its claim is over, so the pool would refuse it."""
        self._ready.pop(entry, None)
        if self._holds_results and entry.is_admitted:
            self._held.get(entry.batch, {}).pop(entry, None)
            self._leave_batch(entry)

    def take(self, *, is_all: bool) -> dict[GroupRequest, CommitEntry]:
        """Remove and return all output that is ready, or only the urgent part, in the order in which it was read."""
        if is_all:
            outputs, self._ready = self._ready, {}
        else:
            outputs = {entry: output for entry, output in self._ready.items() if output.is_urgent}
            for entry in outputs:
                del self._ready[entry]
        return {
            entry: CommitEntry(
                request_id=entry.request.id,
                claim=entry.claim,
                index=output.index,
                tokens=tuple(output.tokens),
                end=output.end,
                waited_ms=_waited_ms(entry) if output.index == 0 and output.tokens else None,
            )
            for entry, output in outputs.items()
        }

    def _leave_batch(self, entry: GroupRequest) -> None:
        alive = self._alive.get(entry.batch)
        if alive is None or entry not in alive:
            return
        alive.remove(entry)
        if not alive:
            del self._alive[entry.batch]
            self._ready |= self._held.pop(entry.batch)


def _waited_ms(entry: GroupRequest) -> int | None:
    return None if entry.waited_ns is None else entry.waited_ns // 1_000_000
