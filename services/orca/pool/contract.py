"""The caller's part of the contract: what both implementations check in the same way and refuse in the same words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orca.core.domain.errors import (
    JustForgotten,
    NameTaken,
    NeverFits,
    NotInForce,
    NotStoredYet,
    OrcaError,
    PoolFull,
    QueueFull,
    UnknownRequest,
)
from orca.core.domain.request import FinishReason, Request, Token
from orca.core.job_files import BODY_BYTES_MAX
from orca.pool import codec
from orca.pool.api import ProcessClosed, SeatLost, StaleCall
from orca.pool.records import Caller, CommitEntry, Submission
from orca.pool.schemas import newer_fields

WANTED_FOR_MS = 5_000
"""Awake time for which a submission refused with PoolFull keeps ended requests under pressure. Its client is asked to
come back after a second."""

SKIPPED_FOR_MS = 60_000
"""Awake time for which a sweep skips a record that this release cannot read: one of a newer release, after a rollback.
Once a minute costs nothing, and a newer release that is back handles the record at most so much later."""

READ_TOKENS_MAX = 2048
READ_BYTES_MAX = 1 << 20
"""Bounds of one read call, over all its logs: some milliseconds during which Redis answers nobody else. The token that
exceeds the bytes is still read, since one token with the log probabilities of a whole prompt may be larger."""

CLOSED_FOR_MS = 24 * 3_600_000
"""Awake time for which the pool remembers a process that has left. The pool needs it only for calls that were sent
before `leave` and arrive after it. A network may delay them until TCP gives up on their connection, a quarter of an
hour. Awake time never runs faster than the wall clock, so a day is long enough, and it bounds what drains leave
behind."""


RESULT_FOR_MS = 3_600_000
"""Time for which the pool keeps the result of a Job. The operator reads it within seconds, or when it runs again. If it
comes too late, it makes the Job again."""

RESULT_BYTES_MAX = BODY_BYTES_MAX
"""Most bytes of a result."""

FORGOTTEN_FOR_MS = 60_000
"""Awake time for which the pool remembers the name of a parent that was forgotten on demand. No submit under the name
stores anything before the next sweep after it.

- A submit that was sent before and comes late stores nothing. A gateway gives a call up, and its connection, within
  seconds.
- The name of a keyed call may be stored again. By then, whoever read the first log has found that it is gone. The log
  watcher of a gateway notices within two of its rounds (ROUND_SECONDS). A client that takes nothing is
  disconnected after a minute, by default (`unread_seconds_max` of a gateway). Awake time never runs faster than the
  wall clock.

The time also bounds what deletions leave behind: some hundred bytes for each one of the last minute."""


@dataclass(slots=True)
class ReadBudget:
    """The tokens and bytes that one call may still read. The script `read` counts in the same way."""

    tokens: int = READ_TOKENS_MAX
    size: int = READ_BYTES_MAX

    @property
    def is_spent(self) -> bool:
        return self.tokens <= 0 or self.size <= 0

    def take(self, tokens: Sequence[Token]) -> tuple[Token, ...]:
        """Return as many of the tokens as the budget allows, from the first on, and subtract them from it."""
        allowed = []
        for token in tokens:
            if self.is_spent:
                break
            allowed.append(token)
            self.tokens -= 1
            self.size -= len(codec.pack_token(token))
        return tuple(allowed)


def check_result(key: str, result: bytes) -> None:
    """Assert what a Job must ensure by itself."""
    assert key.split() == [key], "the key of a result has no spaces"
    assert len(result) <= RESULT_BYTES_MAX, f"a result of {len(result)} bytes is too large"


def check_submission(submission: Submission) -> None:
    """Assert what a gateway must ensure by itself: no request body can break it."""
    requests = submission.requests
    assert requests, "a parent has at least one request"
    assert submission.parent.split() == [submission.parent], "a parent's name has no spaces: scripts join names by them"
    assert len({request.revision for request in requests}) == 1, "choices of a parent share a revision"
    for choice, request in enumerate(requests):
        assert (request.parent, request.choice) == (submission.parent, choice), "choices are numbered from 0"
        assert request.prompt, "a prompt has at least one token"
        assert request.max_new_tokens >= 1, "a request generates at least one token"


def check_entry(entry: CommitEntry) -> None:
    """Assert what a scheduler must ensure by itself: an entry has content, and its end counts the tokens before it."""
    assert entry.tokens or entry.end is not None, "an entry has tokens or an end"
    assert entry.index >= 0, "tokens count from 0"
    if entry.waited_ms is not None:
        assert entry.index == 0, "only a first token tells about the first step"
        assert entry.tokens, "only a first token tells about the first step"
        assert entry.waited_ms >= 0, "a step comes after its claim"
    if entry.end is not None:
        assert entry.end.count == entry.index + len(entry.tokens), "an end counts all tokens"
        is_refused = entry.end.reason is FinishReason.REFUSED
        assert is_refused == (entry.end.detail is not None), "a refusal, and nothing else, has a detail"


def reserved_bytes(submission: Submission, choice: int, body: bytes) -> int:
    """Return the bytes of Redis memory that a request may use until it is forgotten; choice 0 carries its parent's."""
    request = submission.requests[choice]
    tokens = request.max_new_tokens * codec.token_bytes(request.sampling)
    parent = codec.parent_bytes(submission.render, submission.conversation) if choice == 0 else 0
    return parent + codec.fixed_bytes(request, body) + tokens


def stored(request: Request, arrival: int, submitted_ms: int) -> Request:
    """Return the request as the pool keeps it."""
    return replace(request, arrival=arrival, submitted_ms=submitted_ms)


def refusal(verdict: str, bound: int | str, submission: Submission, need: int = 0) -> OrcaError:
    """Return the error for a refused submission, of which nothing was stored. Args: need: of `promise`, in slots."""
    requests = submission.requests
    if verdict == "revision":
        return NotInForce(requests[0].revision, str(bound) or None)
    if verdict == "promise":
        return NeverFits(need, int(bound))
    if verdict == "schema":
        names = {name: None for request in requests for name in newer_fields(request, submission)}
        return NotStoredYet(tuple(names), int(bound))
    if verdict == "forgotten":
        if not submission.digest:
            return UnknownRequest(submission.parent)
        return JustForgotten(submission.parent, rest_s=(FORGOTTEN_FOR_MS - int(bound)) / 1000)
    if verdict == "taken":
        return NameTaken(f"{requests[0].parent} was submitted before with other content")
    if verdict == "queue":
        return QueueFull(f"the queue is full: at most {bound} requests may wait")
    if verdict == "tokens":
        return QueueFull(f"the queue is full: requests with {bound} prompt tokens may wait at most")
    assert verdict == "bytes", verdict
    return PoolFull(f"the pool is full: requests accepted earlier reserve its {bound} bytes")


def verdict_error(verdict: str, caller: Caller) -> Exception:
    """Return the error for a refused call of a scheduler."""
    errors: dict[str, type[Exception]] = {"lost": SeatLost, "closed": ProcessClosed, "stale": StaleCall}
    return errors[verdict](f"process {caller.process} of group {caller.group}")
