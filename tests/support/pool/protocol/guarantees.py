"""Guarantees of the protocol, checked after each event: the logs, their ends, and what clients saw."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orca.core.domain.request import End, FinishReason
from orca.core.domain.step import Claim
from orca.pool.memory.state import RequestRecord
from orca.pool.records import OwnershipState
from support.pool.protocol.stages import Violation

if TYPE_CHECKING:
    from support.pool.protocol.model import Simulation


@dataclass
class Client:
    """Somebody who reads a parent's one request through a gateway, and may come back to another."""

    request_id: str
    parent: str
    gateway: str | None  # of its living connection
    connection: int = 0
    seen: list[int] = field(default_factory=list)
    end: End | None = None
    away_since: int = 0
    is_cancel_asked: bool = False
    is_gone: bool = False  # will not come back
    is_forgotten: bool = False  # the pool was told to forget its parent
    is_newer: bool = False  # its request has a layout that only a newer release reads
    deadlines: frozenset[str] = frozenset()  # the fields of its request that have one

    @property
    def reader(self) -> str:
        return f"{self.parent}/{self.connection}"


class Guarantees:
    """Compares each log with what it was, with the tokens that were drawn, and with what its client saw."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.checked: dict[str, tuple[int, int, End | None]] = {}  # request -> entries, last claim number, end
        self.trials: dict[str, tuple[int, int]] = {}  # request -> its last claim, tokens it had by then
        self.failures: dict[str, int] = {}
        self.answers = 0  # requests that ended by themselves: the pool counts each once
        # Request -> its first claim, step and token on the wall clock: latencies count from the first ones ever.
        self.times: dict[str, tuple[int | None, int | None, int | None]] = {}

    def forget_lost(self) -> None:
        """The pool has failed over: what its replica did not have never happened."""
        for request_id, (_, number, _) in list(self.checked.items()):
            if self.simulation.clients[request_id].is_forgotten:
                continue
            record = self.simulation.pool.state.records[request_id]
            self.checked[request_id] = (record.entries, min(number, record.number), record.end)
        self.times.clear()
        self.answers = self.simulation.pool.state.lengths.answers

    def begin_again(self, request_id: str) -> None:
        """Expect another answer under the name of a request that was forgotten."""
        for kept in (self.checked, self.trials, self.failures, self.times):
            kept.pop(request_id, None)

    def broke(self, rows: Sequence[tuple[str, Claim]]) -> None:
        """A stage broke while it ran these; some may be there under claims that are over."""
        for request_id, claim in rows:
            record = self.simulation.pool.state.records.get(request_id)
            if record is None or Claim(record.number, record.call) != claim:
                continue
            if len(rows) > 1 and record.is_alone and record.is_on_trial:
                raise Violation(f"{request_id} must run alone and was in one step with others")

    def check(self) -> None:
        """Raises: Violation."""
        for client in self.simulation.clients.values():
            self._check_log(client)
        for process in (process for group in self.simulation.groups for process in group.processes if process.has_left):
            seat = self.simulation.pool.state.seats.get(process.group.name)
            if seat is not None and seat.holder == process.word and self.simulation.replica is None:
                raise Violation(f"{process.word} has drained and holds a seat")
        for group in self.simulation.groups:
            for record in self.simulation.pool.state.own.get(group.name, {}).values():
                if record.request.revision != group.revision:
                    raise Violation(f"group {group.name} of {group.revision} owns {record.request.id}")
        state = self.simulation.pool.state
        for counted in (state.lengths.answers, state.latencies.answers):
            if counted != self.answers:
                raise Violation(f"{self.answers} answers ended by themselves and the pool counts {counted}")
        try:
            state.check()
        except AssertionError as broken:
            raise Violation(f"the pool contradicts itself: {broken}") from broken

    def _check_log(self, client: Client) -> None:
        record = self.simulation.pool.state.records.get(client.request_id)
        if client.is_forgotten:
            if record is not None:
                raise Violation(f"{client.request_id} was forgotten and is there")
            return
        if record is None:
            if client.request_id in self.checked and self.checked[client.request_id][2] is not None:
                return  # forgotten after its retention
            raise Violation(f"{client.request_id} was accepted and is lost")
        tokens = [token.id for token in record.log]
        entries, number, end = self.checked.get(client.request_id, (0, 0, None))
        if record.entries < entries or (end is not None and (record.end != end or record.entries != entries)):
            raise Violation(f"{client.request_id}: a log shrank or went on behind its end")
        for index in range(entries, len(tokens)):
            history, claim = self.simulation.drawn[tokens[index]]
            if history != (*record.request.prompt, *tokens[:index]):
                raise Violation(f"{client.request_id}: token {index} was computed after something else than the log")
            # An engine that is exact draws the same token under each claim, so its value does not name the claim.
            if not self.simulation.faults.is_exact and claim.number < number:
                raise Violation(f"{client.request_id}: token {index} comes from claim {claim.number} after {number}")
            number = max(number, 0 if self.simulation.faults.is_exact else claim.number)
        if record.writers != sorted(record.writers):
            raise Violation(f"{client.request_id}: an older claim has written behind a newer one: {record.writers}")
        self._check_blame(record, len(tokens))
        self._check_times(record)
        if client.seen != tokens[: len(client.seen)]:
            raise Violation(f"{client.request_id}: a client saw tokens that are not in the log")
        if end is None and record.end is not None:
            self._check_end(client, record.end, tokens)
        self.checked[client.request_id] = (record.entries, number, record.end)

    def _check_blame(self, record: RequestRecord, tokens: int) -> None:
        request_id = record.request.id
        if record.state is OwnershipState.OWNED and self.trials.get(request_id, (0, 0))[0] != record.number:
            self.trials[request_id] = record.number, tokens
        if record.failures > self.failures.get(request_id, 0) and tokens > self.trials[request_id][1]:
            raise Violation(f"{request_id} is blamed though it has committed under the claim")
        if record.state is OwnershipState.OWNED and record.failures and tokens > self.trials[request_id][1]:
            raise Violation(f"{request_id} has committed and is not acquitted")
        self.failures[request_id] = record.failures

    def _check_times(self, record: RequestRecord) -> None:
        found = record.first_claimed_ms, record.first_step_ms, record.first_token_ms
        for known, now in zip(self.times.get(record.request.id, (None, None, None)), found, strict=True):
            if known is not None and now != known:
                raise Violation(f"{record.request.id} began at {known} and now counts from {now}")
        self.times[record.request.id] = found

    def _check_end(self, client: Client, end: End, tokens: list[int]) -> None:
        self.answers += end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if end.count != len(tokens):
            raise Violation(f"{client.request_id}: the end counts {end.count} of {len(tokens)} tokens")
        # A jump of the clock may pass for a second.
        away_ms = 0 if client.gateway else self.simulation.time - client.away_since + 1000 * self.simulation.jumps
        is_away = away_ms >= self.simulation.pool.settings.resume_grace_ms
        if end.reason is FinishReason.CANCELLED and not (client.is_cancel_asked or is_away):
            raise Violation(f"{client.request_id} was cancelled though its client reads it")
        if end.reason is FinishReason.MODEL_REPLACED and not self._is_retired(client):
            raise Violation(f"{client.request_id} ended before its revision was retired")
        if end.reason is FinishReason.ERROR and client.request_id not in self.simulation.poisoned:
            raise Violation(f"{client.request_id} ended as poison and is innocent")
        deadlines = {"deadline_ms"} if tokens else {"deadline_ms", "first_token_deadline_ms"}
        if end.reason is FinishReason.DEADLINE_EXCEEDED and not client.deadlines & deadlines:
            raise Violation(f"{client.request_id} ended by a deadline that does not hold for it")

    def _is_retired(self, client: Client) -> bool:
        pool = self.simulation.pool
        revision = pool.state.records[client.request_id].request.revision
        replaced_at = self.simulation.replaced_at.get(revision, pool.state.awake)
        return revision != pool.state.revision and pool.state.awake - replaced_at >= pool.settings.retire_ms
