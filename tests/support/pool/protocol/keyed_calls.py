"""Calls of one Idempotency-Key in the model's simulations: one name, again and again, also after it was forgotten."""

from functools import partial
from typing import TYPE_CHECKING

from orca.core.domain.errors import Overloaded, UnknownRequest
from orca.pool.contract import FORGOTTEN_FOR_MS
from orca.pool.memory.pool import MemoryPool
from orca.pool.records import OnDisconnect, Submission
from support.pool.beds import request
from support.pool.protocol.guarantees import Client
from support.pool.protocol.schedulers import Message, now
from support.pool.protocol.stages import Violation

if TYPE_CHECKING:
    from support.pool.protocol.model import Simulation

NAME = "keyed"
REQUEST = f"{NAME}.0"
SUBMIT, FORGET = f"submit {NAME}", f"forget {NAME}"
NOTICED_WITHIN_MS = (0, 2_000, 18_000)
"""Times within which the gateway of a reader finds that a log is gone."""


class KeyedCalls:
    """Makes the calls of one key, and reads for those who have not noticed that an answer of it was forgotten."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.made = self.accepted = 0
        self.submission: Submission | None = None  # that the pool has accepted last
        self.unaware: list[tuple[int, Client]] = []  # readers of forgotten answers, and when each reads again

    def submit(self) -> None:
        """Repeat the call of the key; make another one if it was forgotten, which the pool may refuse."""
        simulation = self.simulation
        known = simulation.clients.get(REQUEST)
        if (known is None or known.is_forgotten) and not self._make():
            return
        assert self.submission is not None, "it was accepted"
        if simulation.random.random() < simulation.faults.repeat_rate:
            again = partial(simulation.submit_again, self.submission)
            simulation.network.append(Message(again, simulation.groups[0].processes[0], SUBMIT, simulation.next_tag()))

    def _make(self) -> bool:
        """Make another call. Returns: whether the pool has accepted it."""
        simulation, pool = self.simulation, self.simulation.pool
        self.made += 1
        client = Client(REQUEST, NAME, simulation.random.choice("xy"), connection=self.made)
        revision = pool.state.revision
        submission = Submission(
            parent=NAME,
            requests=(request(NAME, prompt=(1_000 + self.made,) * 3, max_new_tokens=8, revision=revision),),
            reader=client.reader,
            on_disconnect=OnDisconnect.CANCEL,
            digest=f"body {self.made}",
        )
        try:
            now(pool.submit(submission))
        except (Overloaded, UnknownRequest):
            return False
        self.accepted += 1
        self.submission = submission
        simulation.guarantees.begin_again(REQUEST)
        simulation.clients[REQUEST] = client
        simulation.sync()  # the gateway accepts what the replica has confirmed
        return True

    def forgotten(self, client: Client) -> None:
        """The pool was told to forget the parent of `client`."""
        if client.parent == NAME and client.gateway is not None:
            self.unaware.append((self.simulation.time + self.simulation.random.choice(NOTICED_WITHIN_MS), client))

    def read(self, pool: MemoryPool) -> None:
        """Read for those whose gateway turns to their logs now. Raises: Violation."""
        for entry in list(self.unaware):
            due, client = entry
            if self.simulation.time < due:
                continue
            if REQUEST not in pool.state.records:
                self.unaware.remove(entry)
                continue
            log = now(pool.read(REQUEST, len(client.seen)))
            if log.tokens or log.end is not None:
                raise Violation(f"{REQUEST}: a client of a forgotten answer saw {log} of another one")

    def free_name(self) -> None:
        """The minute of a forgotten name passes: everybody has noticed, and no call about it is on its way any more."""
        forgotten = self.simulation.pool.state.forgotten
        is_on_its_way = any(message.kind in (SUBMIT, FORGET) for message in self.simulation.network)
        if NAME in forgotten and not self.unaware and not is_on_its_way:
            forgotten[NAME] -= FORGOTTEN_FOR_MS
