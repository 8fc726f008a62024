"""What both implementations check and say in the same words: the caller's part of the contract."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orca.core.domain.errors import NameTaken, NeverFits, NotInForce, OrcaError, PoolFull, QueueFull
from orca.core.domain.request import Request, Token
from orca.pool import codec
from orca.pool.api import ProcessClosed, SeatLost, StaleCall
from orca.pool.records import Caller, CommitEntry, Submission

WANTED_FOR_MS = 5_000
"""How long, awake, a submission that found no room keeps ended requests under pressure: its client is told to come back
after a second."""

PASSED_FOR_MS = 60_000
"""How long a sweep leaves alone what this release cannot read: a newer release's, after a rollback. Once a minute costs
nothing, and when the newer one is back, it comes to it at most so much later."""

READ_TOKENS_MAX = 2048
READ_BYTES_MAX = 1 << 20
"""What one call reads, of all its logs together: some milliseconds of a Redis that answers nobody else meanwhile. The
token that passes the bytes is still read, since one with the log probabilities of a whole prompt may have more."""

CLOSED_FOR_MS = 24 * 3_600_000
"""How long, awake, the pool remembers a process that has left. Only calls that it sent before its `leave`, and that
come in behind it, ask for that. A network may hold them back until TCP gives up on their connection, a quarter of an
hour; awake time never runs faster than the wall's, so a day covers that many times, and bounds what drains leave."""


@dataclass(slots=True)
class ReadRoom:
    """What one call may still read. The script `read` counts in the same way."""

    tokens: int = READ_TOKENS_MAX
    size: int = READ_BYTES_MAX

    @property
    def is_spent(self) -> bool:
        return self.tokens <= 0 or self.size <= 0

    def take(self, tokens: Sequence[Token]) -> tuple[Token, ...]:
        """As many of these, from the first on, as there is room for; they use it up."""
        taken = []
        for token in tokens:
            if self.is_spent:
                break
            taken.append(token)
            self.tokens -= 1
            self.size -= len(codec.pack_token(token))
        return tuple(taken)


def check_submission(submission: Submission) -> None:
    """A gateway's own mistakes, which no request body can cause."""
    requests = submission.requests
    assert requests, "a parent has at least one request"
    assert submission.parent.split() == [submission.parent], "a parent's name is one word: scripts join names by spaces"
    assert len({request.revision for request in requests}) == 1, "choices of a parent share a revision"
    for choice, request in enumerate(requests):
        assert (request.parent, request.choice) == (submission.parent, choice), "choices are numbered from 0"
        assert request.prompt, "a prompt has at least one token"
        assert request.max_new_tokens >= 1, "a request generates at least one token"


def check_entry(entry: CommitEntry) -> None:
    """A scheduler's own mistakes: an entry says something, and its end counts the tokens before it."""
    assert entry.tokens or entry.end is not None, "an entry has tokens or an end"
    assert entry.index >= 0, "tokens count from 0"
    assert entry.end is None or entry.end.count == entry.index + len(entry.tokens), "an end counts all tokens"


def reserved_bytes(submission: Submission, choice: int, body: bytes) -> int:
    """Bytes of Redis memory that a request may take until it is forgotten; choice 0 carries its parent's."""
    request = submission.requests[choice]
    tokens = request.max_new_tokens * codec.token_bytes(request.sampling)
    parent = codec.parent_bytes(submission.render) if choice == 0 else 0
    return parent + codec.fixed_bytes(request, body) + tokens


def stored(request: Request, arrival: int, submitted_ms: int) -> Request:
    """The request as the pool keeps it."""
    return replace(request, arrival=arrival, submitted_ms=submitted_ms)


def refusal(verdict: str, bound: int | str, requests: tuple[Request, ...]) -> OrcaError:
    """Why a submission was refused; nothing was stored."""
    if verdict == "revision":
        return NotInForce(requests[0].revision, str(bound) or None)
    if verdict == "promise":
        return NeverFits(max(request.max_total_tokens for request in requests), int(bound))
    if verdict == "taken":
        return NameTaken(f"{requests[0].parent} was submitted with other contents")
    if verdict == "queue":
        return QueueFull(f"{bound} requests may wait and no more")
    if verdict == "tokens":
        return QueueFull(f"requests with {bound} prompt tokens may wait and no more")
    assert verdict == "bytes", verdict
    return PoolFull(f"the pool's {bound} bytes are reserved by requests accepted earlier")


def verdict_error(verdict: str, caller: Caller) -> Exception:
    """Why a scheduler's call was refused."""
    errors: dict[str, type[Exception]] = {"lost": SeatLost, "closed": ProcessClosed, "stale": StaleCall}
    return errors[verdict](f"process {caller.process} of group {caller.group}")
