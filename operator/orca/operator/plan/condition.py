"""A condition of the status."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    is_true: bool
    reason: str
    message: str = ""
