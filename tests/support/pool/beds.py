"""Test beds of the pool: the twin and Redis behind one handle, with builders that fill in defaults."""

import contextlib
import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

from orca.core.domain.request import End, FinishReason, Request, SamplingParams, Token
from orca.core.domain.step import Claim
from orca.pool.api import RequestPool
from orca.pool.memory.pool import MemoryPool
from orca.pool.order.order_class import class_named
from orca.pool.order.order_rules import ClaimOrder
from orca.pool.records import (
    Caller,
    ClaimAnswer,
    Claimed,
    CommitAnswer,
    CommitEntry,
    OnDisconnect,
    OwnershipState,
    SeatEntered,
    Submission,
)
from orca.pool.redis.access import acl_rights
from orca.pool.redis.keys import Keys
from orca.pool.redis.link import RedisLink
from orca.pool.redis.pool import RedisPool
from orca.pool.schemas import SCHEMAS, Schemas
from orca.pool.settings import PoolSettings
from support.waiting import PATIENT_POOL, until

REVISION = "r1"
SETTINGS = PATIENT_POOL
_RECORD_TIMES = ("submitted_ms", "first_claimed_ms", "starts_by_ms", "first_step_ms", "first_token_ms", "ended_ms")
UNREAD_MS = SETTINGS.reader_lease_ms + SETTINGS.resume_grace_ms  # awake, until what nobody reads is cancelled


PASSWORD_FILE = Path(__file__).with_name("password_of_tests")


def add_user(url: str, deployment: str) -> None:
    """The user of a deployment, named like it, with the rights that services have and no others."""
    with SyncRedis.from_url(url) as admin:
        admin.execute_command(
            "ACL", "SETUSER", deployment, "on", f">{PASSWORD_FILE.read_text()}", *acl_rights(deployment)
        )


class FakeClock:
    """Stands in for the pool's clock; the test moves it."""

    def __init__(self, wall: int = 1_700_000_000_000) -> None:
        self.wall = wall

    def wall_ms(self) -> int:
        return self.wall


class Repeated:
    """A pool whose first reply to each call is lost, so that each call comes twice."""

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._pool, name)

        async def twice(*args: Any, **kwargs: Any) -> Any:
            # The lost reply may be a refusal; the second call is refused in the same way.
            with contextlib.suppress(Exception):
                await method(*args, **kwargs)
            return await method(*args, **kwargs)

        return twice


class Bed:
    """A pool and the hands on its clock."""

    def __init__(self, pool: RequestPool, *, is_repeated: bool = False) -> None:
        self.bare = pool
        self.pool: Any = Repeated(pool) if is_repeated else pool
        self.is_repeated = is_repeated
        # What commit answers for an entry that went in.
        self.applied = CommitAnswer.ALREADY_THERE if is_repeated else CommitAnswer.APPLIED

    async def pass_awake(self, ms: int) -> None:
        """Let the pool's awake time pass, as it does while calls come twice a second."""
        raise NotImplementedError

    async def freeze(self, ms: int) -> None:
        """Let wall time pass in which no call reached the pool."""
        raise NotImplementedError

    async def pass_deadlines(self, ms: int) -> None:
        """Let the wall clock pass the deadlines that are at most so far away."""
        raise NotImplementedError

    async def age_requests(self, ms: int) -> None:
        """Let what has happened to the requests lie further back on the wall clock."""
        raise NotImplementedError

    async def wall_ms(self) -> int:
        raise NotImplementedError

    async def report_as(self, part: str, schemas: Schemas) -> None:
        """Let a part of another release say that it lives."""
        raise NotImplementedError

    async def writers(self, request_id: str) -> list[int]:
        """The claim numbers in the entries of a log."""
        raise NotImplementedError

    async def set_record_schema(self, parent: str, number: int) -> None:
        """Let a parent of one request be written under another schema number."""
        raise NotImplementedError

    async def recount(self) -> None:
        """Assert that counters and indexes say what the records say."""
        raise NotImplementedError

    async def close(self) -> None:
        await self.bare.close()


class MemoryBed(Bed):
    """A bed with the pool's twin in memory."""

    def __init__(self, settings: PoolSettings, *, is_repeated: bool = False, schemas: Schemas = SCHEMAS) -> None:
        self.clock = FakeClock()
        self.twin = MemoryPool(self.clock, settings, schemas)
        super().__init__(self.twin, is_repeated=is_repeated)

    async def pass_awake(self, ms: int) -> None:
        self.twin.state.awake += ms

    async def freeze(self, ms: int) -> None:
        self.clock.wall += ms

    async def pass_deadlines(self, ms: int) -> None:
        self.clock.wall += ms

    async def age_requests(self, ms: int) -> None:
        self.clock.wall += ms

    async def wall_ms(self) -> int:
        return self.clock.wall

    async def report_as(self, part: str, schemas: Schemas) -> None:
        self.twin.state.parts[part] = self.twin.state.awake + self.twin.settings.seat_lease_ms, schemas

    async def writers(self, request_id: str) -> list[int]:
        return self.twin.state.records[request_id].writers

    async def set_record_schema(self, parent: str, number: int) -> None:
        self.twin.state.records[f"{parent}.0"].schema = number

    async def recount(self) -> None:
        self.twin.state.check()


class RedisBed(Bed):
    """A bed with the pool in a real Redis."""

    def __init__(
        self, url: str, settings: PoolSettings, *, is_repeated: bool = False, schemas: Schemas = SCHEMAS
    ) -> None:
        self.url = url
        self.deployment = uuid.uuid4().hex
        self.keys = Keys(self.deployment)
        self.redis = Redis.from_url(url)  # as a user who may do everything; the pool is one who may not
        self.is_listening = False  # is its pool subscribed to the news?
        add_user(url, self.deployment)
        self.settings = dataclasses.replace(settings, user=self.deployment, password_file=str(PASSWORD_FILE))
        super().__init__(RedisPool(url, self.deployment, self.settings, schemas), is_repeated=is_repeated)

    async def pass_awake(self, ms: int) -> None:
        await self.redis.hincrby(self.keys.single("meta"), "awake_ms", ms)

    async def freeze(self, ms: int) -> None:
        await self.redis.hincrby(self.keys.single("meta"), "wall_ms", -ms)

    async def pass_deadlines(self, ms: int) -> None:
        # Nobody can move Redis' own clock, so the deadlines come nearer.
        for name, deadline in await self.redis.zrange(self.keys.single("deadlines"), 0, -1, withscores=True):
            await self.redis.zadd(self.keys.single("deadlines"), {name: deadline - ms})
            record = self.keys.named("req", name.decode())
            await self.redis.hincrby(record, "deadline", -ms)
            if await self.redis.hget(record, "deadline_later"):
                await self.redis.hincrby(record, "deadline_later", -ms)
        await self._move_index(("end", "first"), ms)

    async def _move_index(self, kinds: tuple[str, ...], ms: int) -> None:
        """Let the scores of waiting requests with these kinds of deadlines be lower."""
        async for key in self.redis.scan_iter(self.keys.named("waiting", "*")):
            if class_named(key.decode().rpartition(":")[2].partition("/")[2]).kind in kinds:
                for member in await self.redis.zrange(key, 0, -1):
                    await self.redis.zincrby(key, -ms, member)

    async def age_requests(self, ms: int) -> None:
        # Nobody can move Redis' own clock, so the times move.
        async for record in self.redis.scan_iter(self.keys.named("req", "*")):
            for name in _RECORD_TIMES:
                if await self.redis.hexists(record, name):
                    await self.redis.hincrby(record, name, -ms)
        await self._move_index(("none",), ms)

    async def wall_ms(self) -> int:
        seconds, micros = await self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def data_bytes(self) -> int:
        """Memory of the data alone, at this moment.

        Redis takes the buffers of clients off too, but as they were when it looked last, up to a second ago: one that
        has grown since would count as data. The first look makes room for its own answer, so the second one counts.
        """
        for _ in range(2):
            looks = self.redis.pipeline(transaction=True)
            memory, clients = await looks.info("memory").client_list().execute()
        buffers = sum(int(client["tot-mem"]) for client in clients)
        return int(memory["used_memory_dataset"]) + int(memory["mem_clients_normal"]) - buffers

    async def report_as(self, part: str, schemas: Schemas) -> None:
        other = RedisPool(self.url, self.deployment, self.settings, schemas)
        await other.report(part)
        await other.close()

    async def writers(self, request_id: str) -> list[int]:
        entries = await self.redis.xrange(self.keys.named("log", request_id))
        return [int(fields[b"claim"]) for _, fields in entries]

    async def set_record_schema(self, parent: str, number: int) -> None:
        for key in (self.keys.named("par", parent), self.keys.named("req", f"{parent}.0")):
            await self.redis.hset(key, "schema", number)

    async def recount(self) -> None:
        redis, keys = self.redis, self.keys
        meta = {name.decode(): value for name, value in (await redis.hgetall(keys.single("meta"))).items()}
        records = [await redis.hgetall(key) async for key in redis.scan_iter(keys.named("req", "*"), count=1000)]
        states = [record[b"state"].decode() for record in records]
        for state in ("queued", "owned", "ended"):
            assert int(meta.get(state, 0)) == states.count(state), state
        queues = [await redis.zcard(key) async for key in redis.scan_iter(keys.named("q", "*"))]
        own = [await redis.hlen(key) async for key in redis.scan_iter(keys.named("own", "*"))]
        assert (sum(queues), sum(own)) == (states.count("queued"), states.count("owned"))
        written = [int(count) for name, count in meta.items() if name.startswith("written:")]
        assert sum(written) == len(records)
        assert int(meta.get("bytes", 0)) == sum(int(record[b"bytes"]) for record in records)
        waiting = [record for record in records if record[b"state"] == b"queued"]
        assert int(meta.get("queued_prompt_tokens", 0)) == sum(int(record[b"prompt_tokens"]) for record in waiting)
        async for key in redis.scan_iter(keys.named("classes", "*")):
            await self._recount_index(key.decode().rpartition(":")[2])

    async def _recount_index(self, revision: str) -> None:
        """Assert that the index of a revision has exactly its waiting requests, and their deadlines.

        While it is built, it has those up to an arrival.
        """
        counts = await self.redis.hgetall(self.keys.named("classes", revision))
        last = float(counts.pop(b"").split()[-1])  # arrival up to which it is built
        found: dict[str, float] = {}
        for of, count in counts.items():
            waiting = self.keys.named("waiting", f"{revision}/{of.decode()}")
            places = await self.redis.zrange(waiting, 0, -1, withscores=True)
            assert len(places) == int(count), of
            found |= {member.decode().partition(" ")[2]: score for member, score in places}
        queue = await self.redis.zrange(self.keys.named("q", revision), 0, -1, withscores=True)
        expected: dict[str, float] = {}
        for name, arrival in queue:
            if arrival > last:
                continue
            record = await self.redis.hmget(self.keys.named("req", name.decode()), "deadline", "submitted_ms")
            expected[name.decode()] = float(record[0] or record[1])
        assert found == expected

    async def close(self) -> None:
        await self.redis.aclose()
        await super().close()


def request(parent: str = "a", choice: int = 0, **changes: Any) -> Request:
    """Return a request of a parent, with changes."""
    defaults: dict[str, Any] = {"revision": REVISION, "prompt": (1, 2, 3, 4), "max_new_tokens": 12}
    return Request(parent=parent, choice=choice, **{"sampling": SamplingParams(), **defaults, **changes})


def submission(
    parent: str = "a", *, n: int = 1, on_disconnect: OnDisconnect = OnDisconnect.CANCEL, **changes: Any
) -> Submission:
    """Return a submission of a parent with its requests."""
    return Submission(
        parent=parent,
        requests=tuple(request(parent, choice, **changes) for choice in range(n)),
        reader="reader",
        on_disconnect=on_disconnect,
        render='{"kind":"test"}',
    )


class Scheduler:
    """A scheduler process with its rising call numbers; it claims with plenty of slots unless told."""

    def __init__(self, bed: Bed, process: str = "p1", group: str = "g1", revision: str = REVISION) -> None:
        self.bed = bed
        self.caller = Caller(group=group, process=process, revision=revision)
        self.calls = 0

    def next_call(self) -> int:
        self.calls += 1
        return self.calls

    async def enter(self, *, reported_epoch: int = 0, is_holder_dead: bool = False) -> int:
        """The epoch entered."""
        answer = await self.bed.pool.enter(
            self.caller, self.next_call(), reported_epoch=reported_epoch, is_holder_dead=is_holder_dead
        )
        assert isinstance(answer, SeatEntered), answer
        assert answer.epoch.holder == self.caller.process
        return answer.epoch.number

    async def fail(self, *ran: Claimed) -> SeatEntered:
        """Enter again after the group's engine failed from inside while these ran."""
        blamed = {claimed.request.id: claimed.claim for claimed in ran}
        answer: SeatEntered = await self.bed.pool.enter(self.caller, self.next_call(), reported_epoch=0, blamed=blamed)
        return answer

    async def ask(
        self,
        *,
        free_slots: int = 10_000,
        total_slots: int = 10_000,
        most: int = 100,
        order: ClaimOrder | None = None,
    ) -> ClaimAnswer:
        answer: ClaimAnswer = await self.bed.pool.claim(
            self.caller,
            self.next_call(),
            free_slots=free_slots,
            total_slots=total_slots,
            block_tokens=16,
            most=most,
            order=order,
        )
        return answer

    async def take(self, **slots: Any) -> dict[str, Claimed]:
        return {claimed.request.id: claimed for claimed in (await self.ask(**slots)).claimed}

    async def heartbeat(self, *, is_formed: bool = True, offered_slots: int | None = None) -> dict[str, Claim]:
        beat = await self.bed.pool.heartbeat(self.caller, is_formed=is_formed, offered_slots=offered_slots)
        return dict(beat.owned)


def entry(claimed: Claimed, index: int, *tokens: int, end: FinishReason | None = None) -> CommitEntry:
    """Return the entry of a commit for a claimed request."""
    return CommitEntry(
        request_id=claimed.request.id,
        claim=claimed.claim,
        index=index,
        tokens=tuple(map(Token, tokens)),
        end=None if end is None else End(end, index + len(tokens)),
    )


async def started(bed: Bed, *parents: str, **changes: Any) -> tuple[Scheduler, dict[str, Claimed]]:
    """A seated scheduler that owns a request of each parent."""
    await bed.pool.set_revision(REVISION, 1)
    for parent in parents:
        await bed.pool.submit(submission(parent, **changes))
    scheduler = Scheduler(bed)
    await scheduler.enter()
    return scheduler, await scheduler.take()


async def whole_log(pool: RequestPool, request_id: str) -> list[Token]:
    """All tokens of a log, page by page."""
    tokens: list[Token] = []
    while True:
        page = await pool.read(request_id, len(tokens))
        tokens += page.tokens
        if not page.is_cut:
            return tokens


async def state(bed: Bed, request_id: str) -> OwnershipState:
    """Return the state of a request."""
    found: OwnershipState = (await bed.pool.status(request_id)).state
    return found


async def until_followed(redis: Redis) -> None:
    """Wait until a replica has all that this server has, and follows it."""

    async def is_online() -> bool:
        state = await redis.info("replication")
        return bool(state["connected_slaves"]) and state["slave0"]["state"] == "online"

    await until(is_online, limit_s=60)


def connections(url: str) -> Callable[[], AbstractConnection]:
    """Makes connections to a Redis as a pool has them."""
    return RedisLink(url, Keys("d"), SETTINGS, SCHEMAS).connection


def with_settings(**changes: int) -> PoolSettings:
    """Return the beds' settings with changes."""
    return dataclasses.replace(SETTINGS, **changes)
