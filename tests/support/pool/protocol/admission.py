"""The pool's admission in the model's simulations: requests within the promise are accepted, all others refused."""

from typing import TYPE_CHECKING

from orca.core.domain.errors import NeverFits, Overloaded
from orca.pool.records import LargerRequests, Submission
from support.pool.beds import REVISION
from support.pool.protocol.schedulers import now
from support.pool.protocol.stages import Violation

if TYPE_CHECKING:
    from support.pool.protocol.model import Simulation


class AdmissionCheck:
    """Compares each answer to a submission with the promise in force."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.promise = REVISION, 1 << 31  # revision and slots, as they were stated last

    def check(self, submission: Submission, refusal: NeverFits | Overloaded | None) -> None:
        """Args: refusal: None when it was accepted. Raises: Violation."""
        revision, slots = self.promise
        need = max(request.max_total_tokens for request in submission.requests)
        if isinstance(refusal, NeverFits) and need <= slots:
            raise Violation(f"{submission.parent} fits and was refused: {refusal}")
        if refusal is None and submission.requests[0].revision == revision and need > slots:
            raise Violation(f"{submission.parent} was accepted though {self.promise} is promised")

    def restate(self) -> None:
        """Lower or raise the promise, as a rollout of other groups does, and count the requests that it waits for.

        It may have looked before somebody else did the same.
        """
        pool, slots = self.simulation.pool, self.simulation.random.choice((8, 16, 64, 128))
        revision = pool.state.revision
        assert revision is not None
        promised = now(pool.promise_slots(revision, 128))
        expected = self.simulation.random.choice((promised, promised, 8))
        answer = now(pool.set_promise(revision, slots, expected=expected))
        slots = slots if expected == promised else promised
        if answer != slots:
            raise Violation(f"{revision} was promised {slots} slots and the pool says {answer}")
        self.promise = revision, slots
        found = now(pool.larger_requests(revision, slots))
        needs = [
            record.request.max_total_tokens
            for record in pool.state.records.values()
            if record.end is None and record.request.revision == revision and record.request.max_total_tokens > slots
        ]
        least, most = min(needs, default=0), max(needs, default=0)
        if found != LargerRequests(promised_slots=slots, unfinished=len(needs), smallest=least, largest=most):
            raise Violation(f"{needs} need more than {slots} slots and the pool says {found}")
