"""An executable model of the pool's protocol: who calls what, what the network does to it, and what must stay true.

A seeded walk drives the in-memory pool with scheduler processes, stages, gateways and clients. Messages are delayed,
reordered, repeated and lost. Processes crash, freeze and come twice. Stages lose their state. The pool stands still,
its clock jumps, and it fails over to a replica that lags. After each event the walk checks the promises; at the end all
faults stop and every request must end.

`without` names rules of the parts around the pool that a walk leaves out, to see that it finds what they are for.
Rules of the pool itself are left out by a subclass of MemoryPool.
"""

import contextlib
import copy
import itertools
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from orca.core.domain.errors import NameTaken, NeverFits, Overloaded, UnknownRequest
from orca.core.domain.request import Request, slots_needed
from orca.core.domain.step import Claim
from orca.pool.api import ProcessClosed, SeatLost, StaleCall
from orca.pool.memory.pool import MemoryPool
from orca.pool.records import OnDisconnect, Submission
from orca.pool.schemas import SCHEMA_OF_ORDERS, SCHEMAS
from orca.pool.settings import PoolSettings
from support.pool.beds import REVISION, FakeClock, request
from support.pool.protocol.admission import AdmissionCheck
from support.pool.protocol.calls import CallGuarantees
from support.pool.protocol.faults import FaultSettings, draw_fault_settings
from support.pool.protocol.guarantees import Client, Guarantees
from support.pool.protocol.keyed_calls import NAME as KEYED
from support.pool.protocol.keyed_calls import KeyedCalls
from support.pool.protocol.orders import GroupOrders, draw_fields
from support.pool.protocol.schedulers import BLOCK, Group, Message, Process, now
from support.pool.protocol.stages import Stage, Violation

EVENTS = 500
SETTLE_ROUNDS = 700
EPOCHS_WHILE_QUIET_MAX = 8
RETIRE_MS = 10_000
NEXT_REVISION = "r2"
DEADLINES = ("deadline_ms", "first_token_deadline_ms")

INDEXED_AT_ONCE = 2
"""Waiting requests that a claim puts into an index that is not whole, in every second walk: few wait in a walk."""


class Simulation:
    """Everything there is, one random source, and the promises."""

    def __init__(
        self,
        seed: int,
        *,
        pool_class: type[MemoryPool] = MemoryPool,
        without: frozenset[str] = frozenset(),
        faults: FaultSettings | None = None,
    ) -> None:
        self.random = Random(seed)
        self.without = without
        self.clock = FakeClock()
        self.time = 0  # what really passed; the wall clock may jump
        self.jumps = 0
        self.pool = pool_class(self.clock, PoolSettings(retire_ms=RETIRE_MS))
        if seed % 2:
            self.pool.indexed_at_once = INDEXED_AT_ONCE
        self.network: list[Message] = []
        self.replies: list[tuple[Message, Any]] = []
        self.tags = itertools.count()
        self.generations = itertools.count(2)
        self.outage_until = 0
        self.is_quiet = False
        self.faults = faults or draw_fault_settings(self.random)
        self.drawn: dict[int, tuple[tuple[int, ...], Claim]] = {}
        self.clients: dict[str, Client] = {}
        self.poisoned: dict[str, int] = {}  # request -> length at which it breaks the stage that runs it
        self.timers: list[tuple[int, str]] = []  # a gateway's own cancel timers, where it has them
        self.guarantees = Guarantees(self)
        self.calls = CallGuarantees(self)
        self.admission = AdmissionCheck(self)
        self.keyed = KeyedCalls(self)
        self.orders = GroupOrders(self)
        self.replica: MemoryPool | None = None
        self.groups: list[Group] = []
        self.generation = 1  # highest that reached the pool
        self.replaced_at: dict[str, int] = {}  # revision -> awake time at which another one became current
        now(self.pool.set_revision(REVISION, 1))
        if self.faults.has_replica:
            self.sync()
        self.groups = [Group("a", 64, Stage(self)), Group("b", 64, Stage(self)), Group("big", 128, Stage(self))]
        if self.faults.has_next_revision:
            self.groups.append(Group("next", 128, Stage(self), revision=NEXT_REVISION))
        for group in self.groups:
            self.start(group)

    def next_tag(self) -> int:
        return next(self.tags)

    @property
    def is_pool_up(self) -> bool:
        return self.time >= self.outage_until

    def draw(self, history: tuple[int, ...], claim: Claim) -> int:
        """The next token after `history`; its value tells what it was computed from."""
        salt = 0 if self.faults.is_exact else self.random.getrandbits(32)
        token = hash((history, salt)) & (2**62 - 1)
        self.drawn[token] = (history, claim)
        return token

    # the walk

    def walk(self) -> None:
        """Some hundred events with faults, then quiet until every request has ended. Raises: Violation."""
        for _ in range(EVENTS):
            self.event()
            self.guarantees.check()
        self.settle()

    def event(self) -> None:
        roll = self.random.random()
        if self.random.random() < self.faults.fault_rate:
            getattr(self, self.random.choice(self.faults.faults))()
        elif roll < 0.40:
            self.deliver()
        elif roll < 0.60:
            self.reply()
        elif roll < 0.80:
            self.act()
        elif roll < 0.93:
            self.pass_time(self.random.choice((20, 100, 300, 600)))
        elif roll < 0.97:
            self.submit()
        else:
            self.return_client()

    def deliver(self) -> None:
        if not self.network:
            return
        at = self.random.randrange(len(self.network))
        if self.network[at].due > self.time and not self.is_quiet:
            return
        message = self.network.pop(at)
        if message.is_for_pool and not self.is_pool_up:
            return  # nobody answers; the sender calls again
        chance = self.random.random()
        if chance < self.faults.repeat_rate and not self.is_quiet:
            # It arrives once more, soon or when everybody has moved on.
            self.network.append(replace(message, due=self.time + self.random.choice((0, 500, 2_000, 5_000))))
            if chance < self.faults.repeat_rate / 4:
                return  # and only then
        if chance > 0.95 and not self.is_quiet:
            return  # lost
        try:
            answer = message.run()
        except (SeatLost, ProcessClosed, StaleCall) as refusal:
            answer = refusal
        if message.kind in ("leave", "give back") and answer is None:
            answer = "done"
        if self.is_quiet or self.random.random() > 0.10:
            self.replies.append((message, answer))

    def reply(self) -> None:
        if self.replies:
            message, answer = self.replies.pop(self.random.randrange(len(self.replies)))
            message.sender.take(message, answer)

    def act(self) -> None:
        group = self.random.choice(self.groups)
        if group.alive:
            self.random.choice(group.alive).tick()
        elif not group.is_gone and self.random.random() < 0.3:
            self.start(group)

    def pass_time(self, ms: int) -> None:
        self.time += ms
        self.clock.wall += ms
        if not self.is_pool_up:
            return
        for at, parent in [timer for timer in self.timers if timer[0] <= self.time]:
            self.timers.remove((at, parent))
            now(self.pool.cancel(parent))
        for gateway in ("x", "y"):
            # Each gateway calls twice a second, and some call always gets through.
            readers = [(c.parent, c.reader) for c in self.clients.values() if c.gateway == gateway]
            now(self.pool.sweep())
            now(self.pool.renew(readers))
            self.guarantees.check()
        self.read()

    def start(self, group: Group) -> None:
        group.processes.append(Process(self, group))

    def submit(self) -> None:
        if self.is_pool_up and self.faults.keyed_rate and self.random.random() < self.faults.keyed_rate:
            self.keyed.submit()
            return
        if not self.is_pool_up or len(self.clients) >= 12:
            return
        parent = f"r{len(self.clients)}"
        large = self.faults.large_prompt
        size = self.random.choice((2, 3, 5, 8, large if self.random.random() < 0.3 else 8))
        deadline = self.random.choice((500, 60_000)) if self.random.random() < 0.1 else None
        prompt = (len(self.clients) + 1,) * (size if size == large else 3)
        gateway, revision = self.random.choice("xy"), self.pool.state.revision
        # Without a draw of its own, which would make other walks of all seeds.
        kind = "first_token_deadline_ms" if len(self.clients) % 2 else "deadline_ms"
        fields: dict[str, Any] = {"prompt": prompt, "max_new_tokens": min(size, 8), kind: deadline}
        if self.faults.order_rate:
            fields |= draw_fields(self.random, prompt[0], large, self.pool.state.schema)
        deadlines = frozenset(name for name in DEADLINES if fields.get(name) is not None)
        client = Client(f"{parent}.0", parent, gateway, deadlines=deadlines)
        submission = Submission(
            parent=parent,
            requests=(request(parent, revision=revision, **fields),),
            reader=client.reader,
            on_disconnect=OnDisconnect.CANCEL,
        )
        try:
            now(self.pool.submit(submission))
        except (Overloaded, NeverFits) as refusal:
            self.admission.check(submission, refusal)
            return
        self.admission.check(submission, None)
        self.clients[client.request_id] = client
        if self.faults.poison_rate and self.random.random() < self.faults.poison_rate:
            self.poisoned[client.request_id] = len(prompt) + self.random.choice((0, 0, 1, 2))
        if self.faults.newer_rate and self.random.random() < self.faults.newer_rate:
            client.is_newer = True
            self.pool.state.records[client.request_id].schema = SCHEMAS.newest + 1
        if self.random.random() < 0.3:
            # The gateway repeats the call: its reply was lost, or the first one is still on its way.
            sender = self.groups[0].processes[0]
            again = Message(partial(self.submit_again, submission), sender, "-", self.next_tag())
            self.network.append(again)
        self.sync()  # the gateway accepts what the replica has confirmed

    def submit_again(self, submission: Submission) -> None:
        with contextlib.suppress(UnknownRequest, NameTaken):  # it was forgotten meanwhile, and perhaps made again
            now(self.pool.submit(submission))

    # faults

    def _process(self) -> Process | None:
        alive = [process for group in self.groups for process in group.alive]
        # Faults tell most about a process that has something on its way.
        busy = [process for process in alive if "commit" in process.open]
        if busy and self.random.random() < 0.7:
            return self.random.choice(busy)
        return self.random.choice(alive) if alive else None

    def crash(self) -> None:
        """A process ends; what it sent last may arrive when another has its seat."""
        if process := self._process():
            process.is_alive = False
            delay = self.random.choice((0, 1_000, 2_000, 5_000))
            for message in self.network:
                if message.sender is process:
                    message.due = max(message.due, self.time + delay)

    def scale_away(self) -> None:
        """A group goes for good, unless it is the last; requests that only it could hold wait in vain."""
        group = self.random.choice(self.groups)
        if sum(not other.is_gone for other in self.groups) > 1:
            group.is_gone = True
            for process in group.processes:
                process.is_alive = False

    def replace(self) -> None:
        """A group that has formed makes its revision the current one, under a generation that the rollout draws."""
        formed = [process for group in self.groups for process in group.alive if process.is_formed]
        if formed:
            process = self.random.choice(formed)
            generation = next(self.generations)
            run = partial(self.set_revision, process.caller.revision, generation)
            late = self.time + self.random.choice((0, 0, 1_000, 5_000))
            self.network.append(Message(run, process, "-", self.next_tag(), due=late))

    def set_revision(self, revision: str, generation: int) -> None:
        before = self.pool.state.revision
        now(self.pool.promise_slots(revision, 128))
        in_force = now(self.pool.set_revision(revision, generation))
        if in_force != (revision if generation > self.generation else before):
            raise Violation(f"{in_force} is in force after generation {generation} of {revision}")
        self.generation = max(self.generation, generation)
        if before is not None and in_force != before:
            self.replaced_at[before] = self.pool.state.awake

    def restate(self) -> None:
        self.admission.restate()

    def freeze(self) -> None:
        if process := self._process():
            process.frozen_until = self.time + self.random.choice((500, 2_000, 8_000))

    def double(self) -> None:
        """A second process of a name comes up while the first one lives."""
        group = self.random.choice(self.groups)
        if not group.is_gone and len(group.alive) < 2:
            self.start(group)

    def break_stage(self) -> None:
        self.random.choice(self.groups).stage.crash()

    def drain(self) -> None:
        if process := self._process():
            process.is_leaving = True

    def outage(self) -> None:
        """The pool answers nobody for a while, and its process may have stood still."""
        ms = self.random.choice((2_000, 30_000))
        self.outage_until = self.time + ms
        self.pass_time(ms)

    def pause(self) -> None:
        """Nobody sweeps for a while, so deadlines pass and end nothing."""
        ms = self.random.choice((500, 3_000))
        self.time += ms
        self.clock.wall += ms
        if self.is_pool_up:
            now(self.pool.renew([(client.parent, client.reader) for client in self.clients.values() if client.gateway]))

    def change_schema(self) -> None:
        """An upgrade or a rollback puts the other schema number in force: the lower one has no orders."""
        if self.is_pool_up:
            is_newest = self.pool.state.schema == SCHEMAS.newest
            now(self.pool.set_schema(SCHEMA_OF_ORDERS - 1 if is_newest else SCHEMAS.newest))

    def jump(self) -> None:
        self.jumps += 1
        self.clock.wall += self.random.choice((-3_600_000, 3_600_000))

    def sync(self) -> None:
        """A replica, where there is one, catches up."""
        if self.replica is not None or not self.groups:
            self.replica = copy.deepcopy(self.pool, {id(self.clock): self.clock})
            self.calls.keep_for_replica()

    def fail_over(self) -> None:
        """The replica takes over: what it did not have never happened."""
        if self.replica is None:
            return
        self.pool = copy.deepcopy(self.replica, {id(self.clock): self.clock})
        self.guarantees.forget_lost()
        self.calls.forget_lost()

    # clients

    def leave_client(self) -> None:
        """A connection breaks, or its gateway does: then nobody takes the entry out."""
        connected = [client for client in self.clients.values() if client.gateway]
        if not connected:
            return
        client = self.random.choice(connected)
        client.gateway, client.away_since = None, self.time
        client.is_gone = self.random.random() < 0.3
        if self.random.random() < 0.7 and self.is_pool_up:
            now(self.pool.detach(client.parent, client.reader))
        if "no cancel timer" in self.without:
            self.timers.append((self.time + 2_000, client.parent))

    def return_client(self) -> None:
        for client in self.clients.values():
            if client.gateway is None and not client.is_gone and self.is_pool_up:
                client.gateway = self.random.choice("xy")
                client.connection += 1
                try:
                    now(self.pool.attach(client.parent, client.reader))
                except UnknownRequest:
                    client.is_gone = True
                self.sync()  # the gateway begins to read when the replica has confirmed

    def cancel(self) -> None:
        if self.clients and self.is_pool_up and self.random.random() < 0.3:
            client = self.random.choice(list(self.clients.values()))
            client.is_cancel_asked = True
            now(self.pool.cancel(client.parent))

    def forget(self) -> None:
        """A client deletes its parent. The gateway's call may come again; it answers when the replica has heard it."""
        clients = [client for client in self.clients.values() if not client.is_forgotten and not client.is_newer]
        if not clients or not self.is_pool_up:
            return
        keyed = [client for client in clients if client.parent == KEYED]
        client = self.random.choice(keyed if keyed and self.random.random() < 0.5 else clients)
        client.is_forgotten = client.is_gone = True
        now(self.pool.forget(client.parent))
        self.keyed.forgotten(client)
        if self.random.random() < self.faults.repeat_rate:
            sender = self.groups[0].processes[0]
            run = partial(lambda parent: now(self.pool.forget(parent)), client.parent)
            self.network.append(Message(run, sender, f"forget {client.parent}", self.next_tag()))
        self.sync()

    def free_name(self) -> None:
        self.keyed.free_name()

    def read(self) -> None:
        """Gateways show what is in the log, with a replica only what it has too."""
        source = self.replica or self.pool
        self.keyed.read(source)
        for client in self.clients.values():
            if client.gateway is None or client.request_id not in source.state.records:
                continue
            log = now(source.read(client.request_id, len(client.seen)))
            client.seen += [token.id for token in log.tokens]
            if log.end is not None:
                if client.end not in (None, log.end) or log.end.count != len(client.seen):
                    raise Violation(f"{client.request_id}: a client saw {client.end}, then {log.end}")
                client.end = log.end

    # the end

    def settle(self) -> None:
        """No more faults: messages arrive in order, every group that is left has a process, and all must end."""
        self.is_quiet = True
        self.outage_until = 0
        self.return_client()
        epochs = {group.name: self._epoch(group) for group in self.groups}
        for _ in range(SETTLE_ROUNDS):
            for group in self.groups:
                if not group.alive and not group.is_gone:
                    self.start(group)
                for process in group.alive:
                    process.tick()
            for _ in range(len(self.network)):
                self.deliver()
            for _ in range(len(self.replies)):
                self.reply()
            self.pass_time(100)
            self.guarantees.check()
            if not self.open_requests() and self.time % 10 == 0:
                return
        for group in self.groups:
            if self._epoch(group) - epochs[group.name] > EPOCHS_WHILE_QUIET_MAX:
                raise Violation(f"group {group.name} entered {self._epoch(group)} epochs though nothing failed")
        raise Violation(f"stuck: {self.open_requests()}")

    def _epoch(self, group: Group) -> int:
        return self.pool.state.seats[group.name].epoch if group.name in self.pool.state.seats else 0

    def open_requests(self) -> list[str]:
        """Requests that have not ended though a group is left that could hold them, or their revision is retired."""
        return [
            request_id
            for request_id, client in self.clients.items()
            if not client.is_newer
            and (record := self.pool.state.records.get(request_id)) is not None
            and record.end is None
            and (record.request.revision != self.pool.state.revision or self._can_be_held(record.request))
        ]

    def _can_be_held(self, request: Request) -> bool:
        slots = slots_needed(request.max_total_tokens, BLOCK)
        groups = [group for group in self.groups if not group.is_gone and group.revision == request.revision]
        return any(slots <= group.slots for group in groups)
