"""The model's engine: a group's stages as one, and what they take for a step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orca.core.domain.step import Claim, Epoch

if TYPE_CHECKING:
    from support.pool.protocol.model import Simulation


class Violation(Exception):
    """A promise of the protocol was broken."""


@dataclass
class Step:
    """A step that a stage runs."""

    epoch: Epoch
    number: int
    new: list[tuple[str, Claim, list[int]]]
    freed: list[tuple[str, Claim]]
    rows: list[tuple[str, Claim]]


class Stage:
    """All stages of a group as one: state by (request, claim), steps in order of their numbers within an epoch."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.word = 1  # of the process; a restarted stage is another one
        self.epoch: Epoch | None = None
        self.kept: dict[tuple[str, Claim], list[int]] = {}
        self.results: dict[int, list[tuple[str, Claim, int]]] = {}

    def crash(self) -> None:
        self.word += 1
        self.epoch, self.kept, self.results = None, {}, {}

    def join(self, epoch: Epoch, word: int) -> str:
        """Enter an epoch with nothing, on an order for this very process.

        Suppose that an order comes twice, the second time to the process's successor. The successor would run the
        epoch's steps again with other tokens, while the master has the results of some of them already.
        """
        if word != self.word and "joins by process" not in self.simulation.without:
            return "refused"
        if self.epoch == epoch:
            return "joined"
        if self.epoch is not None and epoch.number <= self.epoch.number:
            return "refused"
        self.epoch, self.kept, self.results = epoch, {}, {}
        return "joined"

    def run(self, step: Step) -> Any:
        if step.epoch != self.epoch and "stage epochs" not in self.simulation.without:
            return "refused"
        if "step numbers" not in self.simulation.without:
            if step.number in self.results:
                return step.epoch, step.number, self.results[step.number]
            if step.number != len(self.results) + 1:
                return None  # waits for the one before; its sender will send it again
        for key in step.freed:
            self.kept.pop(key, None)
        for request_id, claim, tokens in step.new:
            self.kept[request_id, claim] = list(tokens)
        if any(self._is_fatal(key) for key in step.rows):
            self.simulation.guarantees.broke(step.rows)
            self.crash()
            return "broke"
        rows = [(*key, self._draw(key)) for key in step.rows]
        self.results[step.number] = rows
        return step.epoch, step.number, rows

    def _is_fatal(self, key: tuple[str, Claim]) -> bool:
        """A poisoned request breaks the stage when it has come to the length that is fatal for it."""
        return len(self.kept.get(key, ())) >= self.simulation.poisoned.get(key[0], 1_000)

    def _draw(self, key: tuple[str, Claim]) -> int:
        if key not in self.kept:
            raise Violation(f"a stage runs {key} without its state")
        token = self.simulation.draw(tuple(self.kept[key]), key[1])
        self.kept[key].append(token)
        return token
