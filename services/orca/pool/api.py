"""The request pool as its users see it: one method for each transition of the protocol.

Two implementations keep this contract, under one suite of tests: `redis.pool.RedisPool` and `memory.pool.MemoryPool`.
Every method may be called again with the same arguments after a lost reply; its docstring says what it answers then.
Any method raises PoolUnavailable if the pool gave no answer: the call may have happened or not. A cancelled call ends
its task, also when the answer comes at the same moment.

Some answers may be passed on to others, so they must survive a kill of the pool's server. These are the answers of
submit, parent, read, read_many, status, cancel, forget, attach, commit, set_schema, set_revision, promise_slots,
set_promise, state_block_tokens, larger_requests and keep_result. Such a call answers only when its content survives a
kill, and raises PoolUnavailable if that is not so in time. A kill may undo the latest ones of all other calls, and
nothing before them. A scheduler notices that at its next heartbeat or commit, as it does for any claim that is over.

    submit                      gateway      queued, with bytes reserved and a first reader
    enter, heartbeat, leave     scheduler    the group's seat
    wait_for_work, claim, commit, give_back    scheduler    owned requests
    cancel, forget, attach, renew, detach, read, read_many, status, log_news    gateway
    sweep                       gateway and scheduler, twice a second
    lengths, latencies                                  whoever plans for the answers
    deadline_counts                                     operator
    set_revision, promise_slots, stats                  scheduler, gateway, operator
    state_block_tokens                                  scheduler
    set_promise, larger_requests, result                operator
    keep_result                                         Jobs of the operator
    report, set_schema          every part with its sweeps; whoever rolls out a release
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from orca.core.domain.request import Request
from orca.core.domain.step import Claim
from orca.pool.hints import LogNews
from orca.pool.latency_counts import LatencyCounts
from orca.pool.order.deadline_counts import DeadlineCounts
from orca.pool.order.order_rules import ClaimOrder
from orca.pool.records import (
    NOBODY_BLAMED,
    Caller,
    ClaimAnswer,
    CommitAnswer,
    CommitEntry,
    Heartbeat,
    LargerRequests,
    LengthCounts,
    LogSlice,
    Parent,
    PoolStats,
    RequestStatus,
    SeatEntered,
    SeatHeld,
    Submission,
)


class SeatLost(Exception):
    """The caller does not hold the seat: it drops everything and enters again."""


class ProcessClosed(Exception):
    """The caller has left: this process may never own anything again."""


class StaleCall(Exception):
    """The call number is below the last one of this process: its sender has moved on, so drop the answer."""


class RequestPool(Protocol):
    """All requests and their token logs.

    The class is long but one idea: the protocol, which has one method per transition.
    """

    @property
    def reader_lease_s(self) -> float:
        """Seconds that a reader entry lives without renewal."""
        ...

    # gateway
    async def submit(self, submission: Submission) -> tuple[Request, ...]:
        """Store all requests of a parent, queued in order of arrival, and its first reader entry.

        If the parent is known, only the reader's entry is added, whatever has happened to the parent since.

        Returns: the requests with `arrival` and `submitted_ms` filled in; the stored ones if the parent is known.
        Raises: QueueFull, PoolFull (nothing stored); NotInForce if the revision is not the current one;
            NeverFits if a request needs more than the promised slots; UnknownRequest if the parent was forgotten on
            demand less than a minute ago, and JustForgotten if the submission has a digest; NameTaken if the parent is
            known under another digest; NotStoredYet if the schema number in force is below that of a field.
        """
        ...

    async def parent(self, parent: str) -> Parent:
        """Return what a gateway needs to render the parent. Raises: UnknownRequest."""
        ...

    async def conversation(self, parent: str) -> str | None:
        """Return what the submission of the parent has as `conversation`. Raises: UnknownRequest."""
        ...

    async def read(self, request_id: str, start: int, limit: int = 1024) -> LogSlice:
        """Return tokens from index `start`, at most `limit` and at most one call's bound. Raises: UnknownRequest."""
        ...

    async def read_many(
        self, starts: Mapping[str, int], limit: int = 1024, *, for_all: bool = False
    ) -> dict[str, LogSlice | None]:
        """`read` many logs (request id -> start) in one round trip.

        All of them share the bounds of one call (`contract.ReadBudget`), in the order in which they are named. A log
        beyond the bounds is cut, possibly to an empty slice.

        Args:
            limit: of each log, in tokens.
            for_all: true for the one watcher of a gateway, which reads for all its clients and waits for none of them.
        Returns: the logs that have any entry from their start on; None for a request that the pool does not know.
        """
        ...

    def log_news(self, cursors: Mapping[str, int]) -> AbstractContextManager[LogNews]:
        """Collect the hints about logs from now on: one task waits there for all logs that it reads.

        Args: cursors: request id to the number of entries (tokens and end) already read from its log. The mapping is
            kept, and each wait consults it again.
        """
        ...

    async def status(self, request_id: str) -> RequestStatus:
        """Return the state of a request. Raises: UnknownRequest."""
        ...

    async def cancel(self, parent: str) -> None:
        """End all requests of the parent that have not ended; harmless when there are none."""
        ...

    async def forget(self, parent: str) -> None:
        """Forget a parent with all its records, at once; harmless when there is none.

        Requests that have not ended end as by `cancel`, and whoever reads or runs one finds it unknown. For a minute
        (`contract.FORGOTTEN_FOR_MS`) no submit stores anything under the name. So a late submit does not bring the
        parent back, and a reader of its logs never gets those of a later call of the same name.
        Raises: UnknownRequest if this release cannot read the parent's record, which stays.
        """
        ...

    async def attach(self, parent: str, reader: str) -> None:
        """Add the entry of a connection that starts to read, with a full lease. Raises: UnknownRequest."""
        ...

    async def renew(self, readers: Sequence[tuple[str, str]]) -> None:
        """Give (parent, reader) pairs a full lease again; skip pairs that are gone."""
        ...

    async def detach(self, parent: str, reader: str) -> None:
        """Take out one reader entry, nothing else."""
        ...

    # scheduler
    async def wait_for_work(self, revision: str, timeout_s: float) -> None:
        """Return when a request of `revision` was queued or given back, or after `timeout_s`. A hint, as `log_news`."""
        ...

    async def enter(
        self,
        caller: Caller,
        call: int,
        *,
        reported_epoch: int,
        is_holder_dead: bool = False,
        blamed: Mapping[str, Claim] = NOBODY_BLAMED,
    ) -> SeatEntered | SeatHeld:
        """Take the group's seat and give all its requests back, under a new epoch above every earlier one.

        Args:
            call: rising number of this process; the last one again gets the same answer.
            reported_epoch: the highest epoch that a stage of the group knows, 0 when none does.
            is_holder_dead: the present holder was seen to exit.
            blamed: requests that ran when the group's engine failed from inside (poison.py). Those without a
                commit under this claim have failed once more; other claims on them are skipped.
        Raises: ProcessClosed, StaleCall.
        """
        ...

    async def heartbeat(self, caller: Caller, *, is_formed: bool = True, offered_slots: int | None = None) -> Heartbeat:
        """Renew the seat's lease.

        Args, for `stats` alone:
            is_formed: the group serves. From `enter` to the first heartbeat it counts as not formed.
            offered_slots: the most that one request may need in the group, now and whenever it forms again; None
                where its free memory decides that.
        Raises: SeatLost, ProcessClosed.
        """
        ...

    async def claim(
        self,
        caller: Caller,
        call: int,
        *,
        free_slots: int,
        total_slots: int,
        block_tokens: int,
        most: int,
        order: ClaimOrder | None = None,
    ) -> ClaimAnswer:
        """Own requests of the caller's revision that fit into `free_slots`, at most `most`.

        The oldest go first, or those that another order puts first. It may end requests that are too late, too.

        Args:
            call: rising number of this process, shared with `enter`; the last one again gets the stored answer.
            free_slots, total_slots: of the group, in tokens; block_tokens rounds each request's need up.
            order: None is the order of arrival. It is in force, too, while the schema number is below that of orders.
        Raises: SeatLost, ProcessClosed, StaleCall.
        """
        ...

    async def commit(self, entries: Sequence[CommitEntry]) -> list[CommitAnswer]:
        """Append the tokens and ends of a step: one round trip, one answer per entry, in order."""
        ...

    async def give_back(self, claims: Mapping[str, Claim]) -> None:
        """Return requests (id -> claim) to the queue at their old place; skip a request under another claim."""
        ...

    async def leave(self, caller: Caller) -> None:
        """Drain: give everything back, free the seat if held, and close this process for ever."""
        ...

    # everybody
    async def sweep(self) -> None:
        """Let awake time pass and carry out what is due: leases, unread requests, deadlines, retention."""
        ...

    async def report(self, part: str) -> int:
        """Report that a part of the deployment lives and handles this release's schema numbers, for a seat's lease.

        Every process that sweeps Redis reports by itself.
        Returns: the schema number in force.
        """
        ...

    async def set_schema(self, number: int) -> int:
        """Put another schema number in force, if every part with a living lease reads and writes it.

        A newer one ends the rollout of a release. An older one begins its rollback: the older release may start once
        `stats().newer_records` is 0. A part that comes back and cannot write the number gets PoolUnavailable.
        Returns: the number in force: still the old one if a part does not report the new one.
        """
        ...

    async def set_revision(self, revision: str, generation: int) -> str:
        """Make `revision` the current one if `generation` is newer than the stored one.

        The first revision may be set before any group of it exists. Another one takes over only after a group of it has
        formed (`promise_slots`). So there is always a group to run what submit accepts.

        Returns: the revision in force.
        """
        ...

    async def promise_slots(self, revision: str, slots: int) -> int:
        """Promise the slots that a request of `revision` may need: those of its groups, or the model's length if less.

        Requests that need more and were accepted before the first promise end with reason `refused`: no group can run
        them.

        Returns: the promise in force: the first one made, or the latest of `set_promise`. While the revision is a
            replaced one without requests, nobody relies on the promise, so a group with fewer slots lowers it.
        """
        ...

    async def state_block_tokens(self, caller: Caller, block_tokens: int) -> int:
        """State how many tokens a KV block of the caller's revision has, so that needs in whole blocks are exact.

        The first group states it. Another group may replace it only if nobody relies on it: no other group of the
        revision has a living seat, and all its requests have ended.
        Returns: the number in force. A group with another one does not form.
        """
        ...

    async def set_promise(self, revision: str, slots: int, *, expected: int) -> int | None:
        """Replace the promise for `revision` if it is still `expected`.

        Nothing ends and nothing moves: from now on submit refuses what needs more, and groups with fewer slots do not
        form. Whoever lowers the promise keeps the groups that can hold what was accepted before, until
        `larger_requests` finds none any more. Whoever raises it has groups of that size (`stats().offered_slots`).
        Returns: the promise in force: `slots`, or what another caller has set meanwhile; None if no group has formed,
            as only a group makes the first promise.
        """
        ...

    async def larger_requests(self, revision: str, slots: int) -> LargerRequests:
        """Count the requests of `revision` that need more than `slots`. The cost grows with the number of requests.

        If the promise in the answer is at most `slots`, no more of them will be accepted.
        """
        ...

    async def lengths(self, revision: str) -> LengthCounts:
        """Return how long the answers of `revision` were in the last four hours.

        `commit` counts each answer that it ends with `stop` or `length`, once. Retention and `forget` change no count.
        The answer need not be of one moment: what ends meanwhile may be left out.
        """
        ...

    async def latencies(self, revision: str) -> LatencyCounts:
        """Return how long the answers of `revision` took in the last four hours: those that `lengths` counts, too."""
        ...

    async def deadline_counts(self, revision: str) -> DeadlineCounts:
        """Return how many requests of `revision` that had a deadline were in time in the last four hours.

        The script that ends such a request counts it, once. Ends from outside other than by a deadline are not counted.
        """
        ...

    async def keep_result(self, key: str, result: bytes) -> None:
        """Keep the result of a Job for an hour (`contract.RESULT_FOR_MS`), in place of an earlier one.

        Args: result: at most `contract.RESULT_BYTES_MAX` bytes.
        """
        ...

    async def result(self, key: str) -> bytes | None:
        """Return the result of a Job; None if there is none, or none any more."""
        ...

    async def stats(self) -> PoolStats:
        """Return the pool's counts."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
