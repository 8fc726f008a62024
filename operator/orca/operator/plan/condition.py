"""A condition of the status."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    is_true: bool
    reason: str
    message: str = ""
    is_known: bool = True  # False: nobody can tell whether it is true

    @property
    def status(self) -> str:
        """The status as the API server has it."""
        return str(self.is_true) if self.is_known else "Unknown"
