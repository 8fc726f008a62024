"""The request pool in Redis: one script, one round trip per transition.

It owns the calls: the arguments of a script, the meaning of its reply, and the error that a refusal becomes. The
transitions themselves are the Lua texts in `scripts/`, the keys are in keys.py, the bytes in codec.py.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from orca.core.domain.errors import PoolFull, PoolUnavailable, SettingError, UnknownRequest
from orca.core.domain.request import Request
from orca.core.domain.step import Claim, Epoch
from orca.pool.api import RequestPool
from orca.pool.contract import (
    CLOSED_FOR_MS,
    FORGOTTEN_FOR_MS,
    READ_BYTES_MAX,
    READ_TOKENS_MAX,
    RESULT_FOR_MS,
    SKIPPED_FOR_MS,
    WANTED_FOR_MS,
    check_result,
    check_submission,
    refusal,
    stored,
    verdict_error,
)
from orca.pool.hints import Hints, LogNews
from orca.pool.latency_counts import LatencyCounts
from orca.pool.length_bins import kept_periods
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
    OnDisconnect,
    OwnershipState,
    Parent,
    PoolStats,
    RequestStatus,
    SeatEntered,
    SeatHeld,
    Submission,
)
from orca.pool.redis import script_format
from orca.pool.redis.fair_connections import OutOfMemory
from orca.pool.redis.keys import Keys
from orca.pool.redis.link import CallPurpose, Durability, RedisLink
from orca.pool.redis.server_check import ServerCheck
from orca.pool.redis.subscription import Subscription
from orca.pool.schemas import SCHEMAS, Schemas
from orca.pool.settings import PoolSettings

log = logging.getLogger(__name__)

_COMMIT_ANSWERS = {
    ord("1"): CommitAnswer.APPLIED,
    ord("2"): CommitAnswer.ALREADY_THERE,
    ord("3"): CommitAnswer.ENDED,
    ord("4"): CommitAnswer.NOT_YOURS,
}
_SWEEP_MOST = 100  # due items of each kind in one script: some milliseconds of Redis
_SWEEP_CALLS_MAX = 40
_TIMES = ("first_claimed_ms", "starts_by_ms", "first_token_ms", "ended_ms")  # fields of a record, absent before


async def open_redis_pool(url: str, deployment: str, settings: PoolSettings) -> "RedisPool":
    """Connect to Redis and check that it can keep what the pool promises.

    Args:
        url: `redis://host:port/db`, `rediss://...` or `unix:///path`, without user and password (access.py).
        deployment: a name without braces, colons or spaces; deployments of one Redis do not see each other.
    Raises: SettingError if the server is older than 6.2, may evict keys, keeps no append-only file, or has less
            memory than `bytes_max` needs;
        PoolUnavailable if it does not answer.
    """
    try:
        pool = RedisPool(url, deployment, settings)
    except ValueError as error:
        raise SettingError(f"pool: {error}") from error
    try:
        await pool.check_server()
    except BaseException:
        await pool.close()
        raise
    return pool


class RedisPool(RequestPool):
    """The pool of one deployment. A process has one; it holds few connections for any number of requests.

    The class is long but one idea: the protocol has one method per transition. Each method is one call of a script.
    """

    def __init__(self, url: str, deployment: str, settings: PoolSettings, schemas: Schemas = SCHEMAS) -> None:
        self._settings = settings
        self._part = secrets.token_hex(8)
        self._keys = Keys(deployment)
        self._link = RedisLink(url, self._keys, settings, schemas)
        self._server = ServerCheck(self._link, self._keys, settings, schemas)
        self._hints = Hints(settings.hint_poll_ms / 1000)
        self._subscription = Subscription(
            self._link.connection,
            self._keys.single("news"),
            self._hints,
            connect_s=settings.call_timeout_ms / 1000,
            # Replicas confirm what is read, not what is published.
            uses_contents=settings.replicas == 0,
        )

    @property
    def reader_lease_s(self) -> float:
        return self._settings.reader_lease_ms / 1000

    async def check_server(self) -> None:
        """Check that the server can keep what the pool promises. Raises: see `open_redis_pool`."""
        await self._server.check()

    async def check_server_if_there(self) -> None:
        """Check the server if it answers. A part starts without the pool too: each of its calls tries the pool again.

        Raises: SettingError.
        """
        try:
            await self.check_server()
        except PoolUnavailable as error:
            log.warning("started without the pool: %s", error)

    # gateway

    async def submit(self, submission: Submission) -> tuple[Request, ...]:
        check_submission(submission)
        requests, arguments = submission.requests, script_format.submit_arguments(submission, self._settings)
        await self._server.admit()
        try:
            verdict, *rest = await self._link.run("submit", *arguments, durability=Durability.SURVIVES_FAIL_OVER)
        except OutOfMemory as error:
            raise PoolFull("the pool is full: its Redis has no memory left") from error
        await self._server.admit()
        if verdict == b"known":
            return (await self.parent(submission.parent)).requests
        if verdict != b"ok":
            bound, *need = rest
            raise refusal(verdict.decode(), bound.decode() if isinstance(bound, bytes) else bound, submission, *need)
        return tuple(stored(request, int(rest[0]) + i, int(rest[1])) for i, request in enumerate(requests))

    async def parent(self, parent: str) -> Parent:
        found = await self._link.run("parent", parent, durability=Durability.SURVIVES_KILL)
        if found is None:
            raise UnknownRequest(parent)
        on_disconnect, owner, render, *requests = found
        if any(body is None for body, *_ in requests):
            raise UnknownRequest(parent)
        return Parent(
            parent=parent,
            requests=tuple(script_format.read_request(*request) for request in requests),
            on_disconnect=OnDisconnect(on_disconnect.decode()),
            render=render.decode(),
            owner=owner.decode(),
        )

    async def conversation(self, parent: str) -> str | None:
        found = await self._link.run("conversation", parent, durability=Durability.SURVIVES_KILL)
        if found is None:
            raise UnknownRequest(parent)
        return found.decode() or None

    async def read(self, request_id: str, start: int, limit: int = 1024) -> LogSlice:
        found = (await self.read_many({request_id: start}, limit)).get(request_id, LogSlice(start, (), None))
        if found is None:
            raise UnknownRequest(request_id)
        return found

    async def read_many(
        self, starts: Mapping[str, int], limit: int = 1024, *, for_all: bool = False
    ) -> dict[str, LogSlice | None]:
        if not starts:
            return {}
        asked = list(starts.items())
        logs = "\n".join([f"{request_id} {start}" for request_id, start in asked])
        purpose = CallPurpose.ALL_CLIENTS if for_all else CallPurpose.READING
        reply = await self._link.run(
            "read",
            limit,
            READ_TOKENS_MAX,
            READ_BYTES_MAX,
            logs,
            purpose=purpose,
            durability=Durability.SURVIVES_FAIL_OVER,
        )
        found = dict(script_format.read_slices(asked, *reply))
        return {request_id: found[request_id] for request_id in starts if request_id in found}

    def log_news(self, cursors: Mapping[str, int]) -> AbstractContextManager[LogNews]:
        self._subscription.start(for_logs=True)
        return self._hints.log_news(cursors)

    async def wait_for_work(self, revision: str, timeout_s: float) -> None:
        self._subscription.start(for_logs=False)
        await self._hints.wait_for_work(revision, timeout_s)

    async def status(self, request_id: str) -> RequestStatus:
        fields = ("state", "process", "number", "call", "arrival", "submitted_ms", *_TIMES)
        reply = await self._link.run("status", request_id, *fields, durability=Durability.SURVIVES_KILL)
        record, body, length, last, older = reply
        if record[0] is None or body is None:
            raise UnknownRequest(request_id)
        entry = dict(zip(last[::2], last[1::2], strict=True))
        end = script_format.read_end(entry) if b"end" in entry else None
        state = OwnershipState(record[0].decode())
        is_owned = state is OwnershipState.OWNED
        return RequestStatus(
            request=script_format.read_request(body, record[4], record[5]),
            state=state,
            owner=record[1].decode() if is_owned else None,
            claim=Claim(int(record[2]), record[3].decode()) if is_owned else None,
            tokens=length if end is None else end.count,
            end=end,
            older_waiting=None if older == b"" else int(older),
            **{name: None if ms is None else int(ms) for name, ms in zip(_TIMES, record[6:], strict=True)},
        )

    async def cancel(self, parent: str) -> None:
        await self._link.run("cancel", parent, durability=Durability.SURVIVES_KILL)

    async def forget(self, parent: str) -> None:
        # Confirmed like a submit: what was deleted must not come back with a fail-over.
        if not await self._link.run("forget", parent, durability=Durability.SURVIVES_FAIL_OVER):
            raise UnknownRequest(parent)

    async def attach(self, parent: str, reader: str) -> None:
        # Confirmed like a submit: if a fail-over forgot the reader, its request would be cancelled while it reads.
        times = self._settings.reader_lease_ms, self._settings.resume_grace_ms
        if not await self._link.run("attach", parent, reader, *times, durability=Durability.SURVIVES_FAIL_OVER):
            raise UnknownRequest(parent)

    async def renew(self, readers: Sequence[tuple[str, str]]) -> None:
        if readers:
            names = [name for reader in readers for name in reader]
            await self._link.run("renew", self._settings.reader_lease_ms, *names, purpose=CallPurpose.ALL_CLIENTS)

    async def detach(self, parent: str, reader: str) -> None:
        await self._link.run("detach", parent, reader, self._settings.resume_grace_ms)

    # scheduler

    async def enter(
        self,
        caller: Caller,
        call: int,
        *,
        reported_epoch: int,
        is_holder_dead: bool = False,
        blamed: Mapping[str, Claim] = NOBODY_BLAMED,
    ) -> SeatEntered | SeatHeld:
        verdict, *rest = await self._link.run(
            "enter",
            caller.group,
            caller.process,
            caller.revision,
            call,
            reported_epoch,
            int(is_holder_dead),
            self._settings.seat_lease_ms,
            *script_format.claim_arguments(blamed),
        )
        if verdict == b"entered":
            epoch, *lists = rest
            failed, poisoned = (tuple(names.decode().split()) for names in lists)
            return SeatEntered(Epoch(int(epoch), caller.process), failed, poisoned)
        if verdict == b"wait":
            return SeatHeld(int(rest[0]))
        raise verdict_error(verdict.decode(), caller)

    async def heartbeat(self, caller: Caller, *, is_formed: bool = True, offered_slots: int | None = None) -> Heartbeat:
        lease_ms, slots = self._settings.seat_lease_ms, "" if offered_slots is None else offered_slots
        verdict, *pairs = await self._link.run(
            "heartbeat", caller.group, caller.process, lease_ms, int(is_formed), slots, purpose=CallPurpose.ALL_CLIENTS
        )
        if verdict != b"seated":
            raise verdict_error(verdict.decode(), caller)
        owned = {}
        for request_id, claim in zip(pairs[::2], pairs[1::2], strict=True):
            number, _, claim_call = claim.decode().partition(" ")
            owned[request_id.decode()] = Claim(int(number), claim_call)
        return Heartbeat(owned=owned)

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
        verdict, *rest = await self._link.run(
            "claim",
            caller.group,
            caller.process,
            caller.revision,
            call,
            free_slots,
            total_slots,
            block_tokens,
            most,
            *script_format.order_arguments(order),
        )
        if verdict != b"claimed":
            raise verdict_error(verdict.decode(), caller)
        blocked, waiting, ordered, *given = rest
        claim_call = f"{caller.process}/{call}"
        claimed, damaged = script_format.read_all_claimed(given, claim_call)
        await self.commit(damaged)
        return ClaimAnswer(claimed=claimed, waiting=int(waiting), is_blocked=bool(blocked), is_by_order=bool(ordered))

    async def commit(self, entries: Sequence[CommitEntry]) -> list[CommitAnswer]:
        if not entries:
            return []
        arguments = script_format.commit_arguments(entries)
        answers: bytes = await self._link.run("commit", *arguments, durability=Durability.SURVIVES_KILL)
        return [_COMMIT_ANSWERS[answer] for answer in answers]

    async def give_back(self, claims: Mapping[str, Claim]) -> None:
        if claims:
            await self._link.run("give_back", *script_format.claim_arguments(claims))

    async def leave(self, caller: Caller) -> None:
        await self._link.run("leave", caller.group, caller.process)

    # everybody

    async def sweep(self) -> None:
        settings = self._settings
        await self._server.poll()
        await self.report(self._part)
        for _ in range(_SWEEP_CALLS_MAX):
            has_more = await self._link.run(
                "sweep",
                settings.resume_grace_ms,
                settings.retention_ms,
                settings.retention_least_ms,
                settings.pressure_bytes,
                _SWEEP_MOST,
                WANTED_FOR_MS,
                SKIPPED_FOR_MS,
                CLOSED_FOR_MS,
                FORGOTTEN_FOR_MS,
                purpose=CallPurpose.ALL_CLIENTS,
            )
            if not has_more:
                return

    async def report(self, part: str) -> int:
        return int(await self._link.run("report", part, self._settings.seat_lease_ms, purpose=CallPurpose.ALL_CLIENTS))

    async def set_schema(self, number: int) -> int:
        return int(await self._link.run("set_schema", number, durability=Durability.SURVIVES_KILL))

    async def set_revision(self, revision: str, generation: int) -> str:
        arguments = revision, generation, self._settings.retire_ms
        answer: bytes = await self._link.run("set_revision", *arguments, durability=Durability.SURVIVES_KILL)
        return answer.decode()

    async def promise_slots(self, revision: str, slots: int) -> int:
        arguments = revision, slots, script_format.NEVER_FITS
        return int(await self._link.run("promise_slots", *arguments, durability=Durability.SURVIVES_KILL))

    async def state_block_tokens(self, caller: Caller, block_tokens: int) -> int:
        arguments = caller.group, caller.revision, block_tokens
        return int(await self._link.run("state_block_tokens", *arguments, durability=Durability.SURVIVES_KILL))

    async def set_promise(self, revision: str, slots: int, *, expected: int) -> int | None:
        arguments = revision, slots, expected
        promise = await self._link.run("set_promise", *arguments, durability=Durability.SURVIVES_FAIL_OVER)
        return None if promise is None else int(promise)

    async def larger_requests(self, revision: str, slots: int) -> LargerRequests:
        # If there are none, the groups that could hold them go. A fail-over after that must not forget a lowered
        # promise.
        reply = await self._link.run("larger_requests", revision, slots, durability=Durability.SURVIVES_FAIL_OVER)
        promise, unfinished, smallest, largest = reply
        return LargerRequests(
            promised_slots=int(promise) if promise else None,
            unfinished=int(unfinished),
            smallest=int(smallest),
            largest=int(largest),
        )

    async def lengths(self, revision: str) -> LengthCounts:
        awake_ms, found = await self._read_periods("lengths", revision)
        return LengthCounts(
            periods=tuple(script_format.read_lengths(period, awake_ms, fields) for period, fields in found)
        )

    async def latencies(self, revision: str) -> LatencyCounts:
        awake_ms, found = await self._read_periods("latencies", revision)
        return LatencyCounts(
            awake_ms=awake_ms, periods=tuple(script_format.read_latencies(period, fields) for period, fields in found)
        )

    async def _read_periods(self, kind: str, revision: str) -> tuple[int, list[tuple[int, list[bytes]]]]:
        """Return the awake time, and the periods that have counts with their fields, the newest first."""

        async def fields_of(period: int | str) -> tuple[int, list[bytes]]:
            # A few thousand cells take Redis a millisecond or two. Other calls may come between the periods.
            awake_ms, fields = await self._link.run(kind, revision, period, purpose=CallPurpose.READING)
            return awake_ms, fields

        awake_ms, _ = await fields_of("")
        found = [(period, (await fields_of(period))[1]) for period in kept_periods(awake_ms)]
        return awake_ms, [(period, fields) for period, fields in found if fields]

    async def deadline_counts(self, revision: str) -> DeadlineCounts:
        reply = await self._link.run("deadline_counts", revision, purpose=CallPurpose.READING)
        return script_format.read_deadline_counts(*reply)

    async def keep_result(self, key: str, result: bytes) -> None:
        check_result(key, result)
        await self._link.run("keep_result", key, result, RESULT_FOR_MS, durability=Durability.SURVIVES_KILL)

    async def result(self, key: str) -> bytes | None:
        found: bytes | None = await self._link.run("result", key, purpose=CallPurpose.READING)
        return found

    async def stats(self) -> PoolStats:
        answer = await self._link.run("stats")
        pairs, wall, promise, oldest, groups, formed, replaced, unfinished, offered, in_force, *rest = answer
        block_tokens, by_order = rest
        meta = {name.decode(): value for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
        return PoolStats(
            queued=int(meta.get("queued", 0)),
            owned=int(meta.get("owned", 0)),
            ended=int(meta.get("ended", 0)),
            queued_prompt_tokens=int(meta.get("queued_prompt_tokens", 0)),
            queued_max=self._settings.max_queued,
            queued_prompt_tokens_max=self._settings.max_queued_prompt_tokens,
            ended_ever=int(meta.get("ended_ever", 0)),
            unserved_ever=int(meta.get("unserved_ever", 0)),
            wall_ms=wall,
            oldest_wait_ms=max(0, wall - oldest) if oldest != b"" else 0,
            bytes_reserved=int(meta.get("bytes", 0)),
            bytes_max=self._settings.bytes_max,
            revision=meta["revision"].decode() if "revision" in meta else None,
            generation=int(meta["generation"]) if "revision" in meta else None,
            replaced_revisions=tuple(sorted(revision.decode() for revision in replaced)),
            replaced_unfinished=int(unfinished),
            promised_slots=int(promise) if promise else None,
            block_tokens=int(block_tokens) if block_tokens else None,
            offered_slots=int(offered) if offered else None,
            groups=tuple(sorted(group.decode() for group in groups)),
            groups_formed=tuple(sorted(group.decode() for group in formed)),
            groups_in_force=tuple(sorted(group.decode() for group in in_force)),
            schema=int(meta["schema"]),
            newer_records=script_format.newer_records(meta),
            by_order=script_format.read_order_stats(*by_order) if by_order else None,
        )

    async def close(self) -> None:
        await self._subscription.stop()
        await self._link.close()
