"""What Redis answers, as the pool's own types, and claims as scripts take them. The scripts tell the shapes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orca.core.domain.request import End, Request, Token
from orca.core.domain.step import Claim
from orca.pool import codec
from orca.pool.records import Claimed, LogSlice


def newer_records(meta: Mapping[str, Any]) -> int:
    """Records written under a number above the one in force, out of the fields of `meta`."""
    in_force, prefix = int(meta["schema"]), "written:"
    counts = {int(name.removeprefix(prefix)): int(count) for name, count in meta.items() if name.startswith(prefix)}
    return sum(count for schema, count in counts.items() if schema > in_force)


def read_request(body: bytes, arrival: bytes, submitted_ms: bytes) -> Request:
    """A request out of its body and what the pool added."""
    return codec.unpack_body(body, arrival=int(arrival), submitted_ms=int(submitted_ms))


def claim_words(claims: Mapping[str, Claim]) -> list[str | int]:
    """Claims as scripts take them: three arguments for each."""
    return [word for request_id, claim in claims.items() for word in (request_id, claim.number, claim.call)]


def read_claimed(item: list[Any], claim_call: str) -> Claimed:
    """One request of a claim's answer."""
    number, arrival, submitted_ms, is_alone, body, *tokens = item
    return Claimed(
        request=read_request(body, arrival, submitted_ms),
        claim=Claim(int(number), claim_call),
        log=tuple(map(codec.unpack_token, tokens)),
        is_alone=bool(is_alone),
    )


def read_end(fields: Mapping[bytes, bytes]) -> End:
    """The end out of its entry's fields. Schema 1 has no `stop` where nothing stopped it."""
    return codec.unpack_end(fields[b"end"], fields[b"count"], fields.get(b"stop", b""))


def read_slices(
    asked: Sequence[tuple[str, int]], plain: bytes, *others: list[Any]
) -> Iterator[tuple[str, LogSlice | None]]:
    """What the script found of the logs that it was asked for, by request.

    Args: asked: request and start of each; plain, others: as the script says.
    """
    for line in plain.splitlines():
        which, is_cut, *ids = map(int, line.split())
        request_id, start = asked[which]
        yield request_id, LogSlice(start, tuple(map(Token, ids)), None, is_cut=bool(is_cut))
    for which, *found in others:
        request_id, start = asked[which]
        yield request_id, _read_slice(start, *found) if found else None


def _read_slice(start: int, is_cut: int, *found: Any) -> LogSlice:
    """Args: found: the log's tokens, and behind them the end as a list of its fields."""
    entries = list(found)
    end = codec.unpack_end(*entries.pop()) if entries and isinstance(entries[-1], list) else None
    return LogSlice(start, tuple(map(codec.unpack_token, entries)), end, is_cut=bool(is_cut))
