"""Schema numbers: the layouts of records, and the numbers that a release reads and writes (protocol: schema number).

1: the first.
2: each entry of a log holds the number of the claim that wrote it (codec.py), and a request may have a deadline of its
   first token and a rendering with latency goals, which only gateways of this layout write (gateway/latency_goals.py).
3: a request may have the fields of `SCHEMA_3_FIELDS` and `SCHEMA_3_SAMPLING`, and token 0 the number of cached prompt
   tokens. Some of them are reserved: they are stored and given back, and later releases fill them without another
   number. A reader ignores named fields that it does not know.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from orca.core.domain.request import SCHEMA, Request, SamplingParams
from orca.pool.records import Submission

SCHEMA_3_FIELDS = ("decoder_prefix", "weight", "first_token_goal_ms", "cache_salt", "key_hash", "head_hash")
"""Fields of a request that no release before schema 3 knows: they are stored by name, and only where they are set."""

SCHEMA_3_SAMPLING = ("grammar", "allowed_token_ids", "forbidden_token_ids", "forbidden_sequences")
"""The same, of its sampling parameters."""

SCHEMA_OF_TARGETS = 3
"""The first schema that can store requests of encoder-decoder models: each has a `decoder_prefix`."""

SCHEMA_OF_WEIGHTS = 3
"""The first schema that can store the weight of a request, which is made from its priority."""

SCHEMA_OF_GOALS = 3
"""The first schema that can store the goal for the first token of a request."""

SCHEMA_OF_CACHED_TOKENS = 3
"""The first schema whose records can have the number of cached prompt tokens. It is left out of others."""

SCHEMA_OF_SALTS = 3
"""The first schema that can store the salt of a request."""

SCHEMA_OF_FORMATS = 3
"""The first schema whose gateways may know the formats of a rendering."""


SCHEMA_OF_ORDERS = 3
"""The first schema whose parts keep the index of waiting requests. Below it, claims go by arrival."""


@dataclass(frozen=True, slots=True)
class Schemas:
    """A release's range of schema numbers: it reads and writes all of them, and writes the one in force."""

    oldest: int
    newest: int

    def __contains__(self, number: int) -> bool:
        return self.oldest <= number <= self.newest

    def lua(self) -> str:
        """Return the constants for the head of each script."""
        in_range = f"local SCHEMA_OLDEST, SCHEMA_NEWEST = {self.oldest}, {self.newest}\n"
        least = f"local SCHEMA_OF_ORDERS, SCHEMA_OF_CACHED_TOKENS = {SCHEMA_OF_ORDERS}, {SCHEMA_OF_CACHED_TOKENS}\n"
        return in_range + least


SCHEMAS = Schemas(oldest=max(1, SCHEMA - 1), newest=SCHEMA)
"""The range of this release. It runs beside the release before it until the newer number is in force, and again during
a rollback."""


def named_fields(record: Request | SamplingParams, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named fields that are set: the others have their default."""
    values = {name: getattr(record, name) for name in names}
    return {name: value for name, value in values.items() if value != _DEFAULTS[type(record)][name]}


def newer_fields(request: Request, submission: Submission) -> list[str]:
    """Return the names of the fields that make a request of a submission a record of schema 3."""
    own = named_fields(request, SCHEMA_3_FIELDS), named_fields(request.sampling, SCHEMA_3_SAMPLING)
    return [*own[0], *own[1], *submission.render_names]


def schema_least(request: Request, submission: Submission) -> int:
    """Return the lowest schema number under which a request of a submission can be stored whole."""
    return 3 if newer_fields(request, submission) else 1


_DEFAULTS = {record: {field.name: field.default for field in fields(record)} for record in (Request, SamplingParams)}
