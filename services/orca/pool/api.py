"""The request pool as its users see it: the transitions of the protocol, one method each.

Two implementations keep this contract, under one suite of tests: `redis_pool.RedisPool` and `memory_pool.MemoryPool`.
Every method may be called again with the same arguments after a lost reply; what it answers then is in its docstring.
Any method raises PoolUnavailable when the pool gave no answer: the call may have happened or not. A cancelled call ends
its task, also when the answer comes at the same moment.

What an answer tells of survives a kill of the pool's server where it may be told on: submit, parent, read, read_many,
status, cancel, attach, commit, set_schema, set_revision, promise_slots, set_promise and larger_requests answer only
when that is so, and raise PoolUnavailable when it is not in time. Of what else was answered such a kill may take back
the latest, and nothing that came before it; a scheduler learns of that by its next heartbeat or commit, as of any claim
that is over.

    submit                      gateway      queued, with bytes reserved and a first reader
    enter, heartbeat, leave     scheduler    the group's seat
    wait_for_work, claim, commit, give_back    scheduler    owned requests
    cancel, attach, renew, detach, read, read_many, status, log_news    gateway
    sweep                       gateway and scheduler, twice a second
    set_revision, promise_slots, stats                  scheduler, gateway, operator
    set_promise, larger_requests                        operator
    report, set_schema          every part with its sweeps; whoever rolls out a release
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from orca.core.domain.request import Request
from orca.core.domain.step import Claim
from orca.pool.hints import LogNews
from orca.pool.records import (
    NOBODY,
    Caller,
    ClaimAnswer,
    CommitAnswer,
    CommitEntry,
    Entered,
    Heartbeat,
    LargerRequests,
    LogSlice,
    Parent,
    PoolStats,
    RequestStatus,
    Submission,
    Wait,
)


class SeatLost(Exception):
    """The caller does not hold the seat: it drops everything and enters again."""


class ProcessClosed(Exception):
    """The caller has left: this process may never own anything again."""


class StaleCall(Exception):
    """A call number below the last one of this process: its sender has moved on, drop the answer."""


class Pool(Protocol):
    """All requests and their token logs."""

    @property
    def reader_lease_s(self) -> float:
        """How long a reader entry lives that is not renewed."""
        ...

    # gateway
    async def submit(self, submission: Submission) -> tuple[Request, ...]:
        """Store all requests of a parent, queued in order of arrival, and its first reader entry.

        A parent that is known gets the reader's entry and nothing else, whatever came of it meanwhile.

        Returns: the requests with `arrival` and `submitted_ms` filled in; the stored ones when the parent is known.
        Raises: QueueFull, PoolFull (nothing stored); NotInForce when the revision is not the current one;
            NeverFits when a request needs more than the promised slots; NameTaken when the parent is known under
            another digest.
        """
        ...

    async def parent(self, parent: str) -> Parent:
        """Raises: UnknownRequest."""
        ...

    async def read(self, request_id: str, start: int, limit: int = 1024) -> LogSlice:
        """Tokens from index `start`, at most `limit` and what one call reads. Raises: UnknownRequest."""
        ...

    async def read_many(
        self, starts: Mapping[str, int], limit: int = 1024, *, for_all: bool = False
    ) -> dict[str, LogSlice | None]:
        """`read` of many logs (request id -> start) in one round trip.

        All of them share what one call reads (`contract.ReadRoom`), those named first before the others. What there
        was no room for is cut, down to a slice of nothing.

        Args:
            limit: of each log, in tokens.
            for_all: the one watcher of a gateway reads for all its clients, and waits for none of them.
        Returns: the logs that have anything from their start on; None for a request that the pool does not know.
        """
        ...

    def log_news(self, cursors: Mapping[str, int]) -> AbstractContextManager[LogNews]:
        """What is told of logs from now on: one task waits there for all that it reads.

        Args: cursors: request id to the entries (tokens and end counted) that were read of its log; kept, and looked
            at anew each time.
        """
        ...

    async def status(self, request_id: str) -> RequestStatus:
        """Raises: UnknownRequest."""
        ...

    async def cancel(self, parent: str) -> None:
        """End all requests of the parent that have not ended; harmless when there are none."""
        ...

    async def attach(self, parent: str, reader: str) -> None:
        """A connection starts to read: its own entry, with a full lease. Raises: UnknownRequest."""
        ...

    async def renew(self, readers: Sequence[tuple[str, str]]) -> None:
        """Full lease again for (parent, reader) pairs; pairs that are gone are passed over."""
        ...

    async def detach(self, parent: str, reader: str) -> None:
        """Take out one reader entry, nothing else."""
        ...

    # scheduler
    async def wait_for_work(self, revision: str, timeout_s: float) -> None:
        """Return when a request of `revision` was queued or given back, or in time. A hint, like `log_news`."""
        ...

    async def enter(
        self,
        caller: Caller,
        call: int,
        *,
        reported_epoch: int,
        is_holder_dead: bool = False,
        blamed: Mapping[str, Claim] = NOBODY,
    ) -> Entered | Wait:
        """Take the group's seat and give all its requests back, under a new epoch above every earlier one.

        Args:
            call: rising number of this process; the last one again gets the same answer.
            reported_epoch: the highest epoch that a stage of the group knows, 0 when none does.
            is_holder_dead: the present holder was seen to exit.
            blamed: requests that ran when the group's engine failed from inside (poison.py). Those without a
                commit under this claim have failed once more; other claims of them are passed over.
        Raises: ProcessClosed, StaleCall.
        """
        ...

    async def heartbeat(self, caller: Caller, *, is_formed: bool = True, offered_slots: int | None = None) -> Heartbeat:
        """Renew the seat's lease.

        Args, for `stats` alone:
            is_formed: whether the group serves. From `enter` to the first heartbeat it does not.
            offered_slots: that one request may need in the group at most, now and whenever it forms again; None
                where its free memory decides that.
        Raises: SeatLost, ProcessClosed.
        """
        ...

    async def claim(
        self, caller: Caller, call: int, *, free_slots: int, total_slots: int, block_tokens: int, most: int
    ) -> ClaimAnswer:
        """Own the oldest requests of the caller's revision that fit into `free_slots`, at most `most`.

        Args:
            call: rising number of this process, shared with `enter`; the last one again gets the stored answer.
            free_slots, total_slots: of the group, in tokens; block_tokens rounds each request's need up.
        Raises: SeatLost, ProcessClosed, StaleCall.
        """
        ...

    async def commit(self, entries: Sequence[CommitEntry]) -> list[CommitAnswer]:
        """Append the tokens of a step and the ends it brought: one round trip, one answer per entry, in order."""
        ...

    async def give_back(self, claims: Mapping[str, Claim]) -> None:
        """Return requests (id -> claim) to the queue at their old place; other claims of them are passed over."""
        ...

    async def leave(self, caller: Caller) -> None:
        """Drain: give everything back, free the seat if held, and close this process for ever."""
        ...

    # everybody
    async def sweep(self) -> None:
        """Let awake time pass and carry out what is due: leases, unread requests, deadlines, retention."""
        ...

    async def report(self, part: str) -> int:
        """A part of the deployment lives, and reads and writes this release's schema numbers, for the seat's lease.

        Every process that sweeps Redis does so by itself.
        Returns: the schema number in force.
        """
        ...

    async def set_schema(self, number: int) -> int:
        """Put another schema number in force, if every part with a living lease reads and writes it.

        A newer one ends the rollout of a release. An older one begins its rollback: the older release may start once
        `stats().newer_records` is 0. A part that comes back and cannot write the number gets PoolUnavailable.
        Returns: the number in force: still the old one when a part does not report the new one.
        """
        ...

    async def set_revision(self, revision: str, generation: int) -> str:
        """Make `revision` the current one if `generation` is newer than the stored one.

        The first revision may be set before any group of it exists; another one takes over only after a group of it
        has formed (`promise_slots`), so that there is always somebody to run what submit accepts.
        Returns: the revision in force.
        """
        ...

    async def promise_slots(self, revision: str, slots: int) -> int:
        """State what a request of `revision` may need at most: what its groups hold, or the model's length where less.

        Returns: the promise in force: the first one made, or what `set_promise` stated since. While the revision is a
            replaced one without requests, the promise binds nobody, and the least that a group states counts.

        Requests accepted before the first promise that need more than it end with reason `error`: nobody can run them.
        """
        ...

    async def set_promise(self, revision: str, slots: int, *, expected: int) -> int | None:
        """State anew what a request of `revision` may need at most, where `expected` was promised and still is.

        Nothing ends and nothing moves: the door refuses from now on what needs more, and groups with fewer slots do
        not form. Who lowers it leaves the groups in place that can hold what was accepted before, until
        `larger_requests` finds nothing any more. Who raises it has groups that hold so much (`stats().offered_slots`).
        Returns: the promise in force: `slots`, or what somebody else has stated since; None where no group has formed,
            which states the first one.
        """
        ...

    async def larger_requests(self, revision: str, slots: int) -> LargerRequests:
        """Which requests of `revision` need more than so many slots. Its cost grows with the requests that there are.

        Where the promise that comes with the answer is at most `slots`, no more of them will be accepted.
        """
        ...

    async def stats(self) -> PoolStats: ...

    async def close(self) -> None: ...
