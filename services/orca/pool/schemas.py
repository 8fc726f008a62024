"""Schema numbers: the layouts of records, and the numbers that a release reads and writes (protocol: schema number).

1: the first.
2: each entry of a log holds the number of the claim that wrote it (codec.py), and a request may have a deadline of its
   first token and a rendering with latency goals, which only gateways of this layout write (gateway/latency_goals.py).
"""

from dataclasses import dataclass

from orca.core.domain.request import SCHEMA


@dataclass(frozen=True, slots=True)
class Schemas:
    """A release's range of schema numbers: it reads and writes all of them, and writes the one in force."""

    oldest: int
    newest: int

    def __contains__(self, number: int) -> bool:
        return self.oldest <= number <= self.newest

    def lua(self) -> str:
        """Return the constants for the head of each script."""
        return f"local SCHEMA_OLDEST, SCHEMA_NEWEST = {self.oldest}, {self.newest}\n"


SCHEMAS = Schemas(oldest=max(1, SCHEMA - 1), newest=SCHEMA)
"""The range of this release. It runs beside the release before it until the newer number is in force, and again during
a rollback."""
