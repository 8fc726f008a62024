"""The arguments that scripts take and the replies that they give, as the pool's own types.

submit: the fields of `ParentArguments` and `RequestArguments` are the only list of its arguments. In the script they
are the tables `PARENT_ARGUMENTS` and `REQUEST_ARGUMENTS`, so Lua reads them in the order in which Python writes them.

commit: all entries in one argument. A step has hundreds of entries, and each argument costs packing.

    a line per entry      request, claim number, claim call, index, reason or -, n, tokens ...; the index of a first
                          token may be 0@ and the ms from the claim to the first step
    n arguments after it  its tokens, if one of them has log probabilities and all are bytes; 0 if the line has them
    and one more          the stop of its end, if the entry has an end

Each script's head describes its replies.
"""

import logging
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson

from orca.core.domain.errors import NeverFits, PoolUnavailable, SettingError
from orca.core.domain.request import End, FinishReason, Request, Token
from orca.core.domain.step import Claim
from orca.pool import codec, latency_bins, length_bins
from orca.pool.contract import check_entry, reserved_bytes
from orca.pool.latency_bins import LATENCIES, AnswerLatency
from orca.pool.latency_counts import PeriodLatencies
from orca.pool.length_bins import age_ms
from orca.pool.order.deadline_counts import DeadlineCounts, PeriodDeadlines
from orca.pool.order.order_class import OrderClass, class_named, fewest_tokens, whole_priority
from orca.pool.order.order_rules import ClaimOrder, Drop, Order, OrderRules, RunEstimates, Utility
from orca.pool.order.order_stats import OrderStats
from orca.pool.records import Claimed, CommitEntry, LogSlice, PeriodLengths, Submission
from orca.pool.schemas import schema_least
from orca.pool.settings import PoolSettings

log = logging.getLogger(__name__)

Argument = str | bytes | int

NEVER_FITS = orjson.dumps(NeverFits.WORDS)
"""The reason that `promise_slots` stores with the end of a request that is too large for its group."""

DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error)
"""Errors of reading damaged bytes. Nothing of ours writes them, but a Redis may be restored, moved or edited."""

_CLAIMED_HEAD = ("number", "arrival", "submitted_ms", "is_alone", "slack_ms", "body")


class ParentArguments(NamedTuple):
    """Arguments of a submission; those of its requests follow."""

    parent: str
    revision: str
    reader: str
    on_disconnect: str
    render: str
    reader_lease_ms: int
    grace_ms: int
    max_queued: int
    bytes_max: int
    reserved: int  # bytes, of all requests
    choices: int
    max_queued_prompt_tokens: int
    owner: str
    digest: str
    conversation: str  # empty if there is none


class RequestArguments(NamedTuple):
    """Arguments of one request of a submission."""

    body: bytes
    need: int  # tokens of its own block table
    source: int | str  # tokens of the second block table, empty if it has one
    schema_least: int
    prompt_tokens: int
    max_new: int
    reserved: int  # bytes
    token_bytes: int
    deadline_ms: int | str  # empty if there is none
    first_token_deadline_ms: int | str  # empty if there is none
    priority: int | str  # empty if it is 0
    fewest: int | str  # tokens of the shortest output, empty if it is 1
    goal: int | str  # ms from submission in which the first token should come, empty if there is none


def submit_arguments(submission: Submission, settings: PoolSettings) -> list[Argument]:
    """Return the arguments that store a submission."""
    bodies = codec.pack_bodies(submission.requests)
    reserved = [reserved_bytes(submission, choice, body) for choice, body in enumerate(bodies)]
    parent = ParentArguments(
        parent=submission.parent,
        revision=submission.requests[0].revision,
        reader=submission.reader,
        on_disconnect=submission.on_disconnect.value,
        render=submission.render,
        reader_lease_ms=settings.reader_lease_ms,
        grace_ms=settings.resume_grace_ms,
        max_queued=settings.max_queued,
        bytes_max=settings.bytes_max,
        reserved=sum(reserved),
        choices=len(bodies),
        max_queued_prompt_tokens=settings.max_queued_prompt_tokens,
        owner=submission.owner,
        digest=submission.digest,
        conversation=submission.conversation or "",
    )
    arguments: list[Argument] = [*parent]
    for request, body, size in zip(submission.requests, bodies, reserved, strict=True):
        arguments += _request_arguments(request, body, size, schema_least(request, submission))
    return arguments


def _request_arguments(request: Request, body: bytes, size: int, schema: int) -> RequestArguments:
    first_token_deadline_ms = request.first_token_deadline_ms
    need, *source = request.table_tokens
    return RequestArguments(
        need=need,
        source=source[0] if source else "",
        schema_least=schema,
        prompt_tokens=len(request.prompt),
        max_new=request.max_new_tokens,
        reserved=size,
        token_bytes=codec.token_bytes(request.sampling),
        deadline_ms="" if request.deadline_ms is None else request.deadline_ms,
        first_token_deadline_ms="" if first_token_deadline_ms is None else first_token_deadline_ms,
        priority=whole_priority(request) or "",
        fewest=least if (least := fewest_tokens(request)) > 1 else "",
        goal="" if request.first_token_goal_ms is None else request.first_token_goal_ms,
        body=body,
    )


def submit_tables() -> str:
    """Return the names of the arguments of `submit`, as Lua for the head of each script."""
    tables = {"PARENT_ARGUMENTS": ParentArguments, "REQUEST_ARGUMENTS": RequestArguments}
    lines = [f"local {name} = {{ {_quoted_fields(arguments)} }}\n" for name, arguments in tables.items()]
    return "".join(lines)


def _quoted_fields(arguments: type[ParentArguments] | type[RequestArguments]) -> str:
    return ", ".join(f"'{name}'" for name in arguments._fields)


def order_arguments(order: ClaimOrder | None) -> list[Argument]:
    """Return the arguments of a claim by another order than arrival (order.lua), none for that."""
    if order is None:
        return []
    rules, estimates = order.rules, order.estimates
    measured = estimates.prompt_token_ms, estimates.step_ms, estimates.least_step_ms, estimates.prompt_cost
    return [
        repr(rules.utility_share),
        rules.utility.value,
        rules.patience_ms,
        rules.drop.value,
        *map(repr, measured),
        repr(1 - rules.eta),
        order.free_prompt_tokens,
        order.total_prompt_tokens,
        *(argument for number, mean in estimates.outputs for argument in (number, repr(mean))),
    ]


def read_order(arguments: bytes) -> ClaimOrder | None:
    """Build the order of a claim from its arguments in one string (`order_arguments`).

    Returns: None for an empty one, and for one of a release with other rules, which may run beside this one.
    """
    try:
        return _read_order(*arguments.decode().split()) if arguments else None
    except (ValueError, TypeError, SettingError):
        return None


def _read_order(share: str, utility: str, patience_ms: str, drop: str, *rest: str) -> ClaimOrder:
    """Args: as `order_arguments` returns them. Raises: ValueError, SettingError."""
    prompt_token_ms, step_ms, least_step_ms, prompt_cost, q, free, total, *outputs = map(float, rest)
    return ClaimOrder(
        rules=OrderRules(
            order={0.0: Order.EDF, 1.0: Order.SJF}.get(float(share), Order.DEADLINE),
            utility=Utility(utility),
            eta=round(1 - q, 9),  # it is not sent itself: q of a share such as 0.1 is not exact
            patience_ms=int(patience_ms),
            drop=Drop(drop),
        ),
        estimates=RunEstimates(
            prompt_token_ms=prompt_token_ms,
            step_ms=step_ms,
            least_step_ms=least_step_ms,
            prompt_cost=prompt_cost,
            outputs=tuple((int(number), mean) for number, mean in zip(outputs[::2], outputs[1::2], strict=True)),
        ),
        free_prompt_tokens=int(free),
        total_prompt_tokens=int(total),
    )


def claim_arguments(claims: Mapping[str, Claim]) -> list[str | int]:
    """Return three arguments for each claim: request, number and call."""
    return [argument for request_id, claim in claims.items() for argument in (request_id, claim.number, claim.call)]


def commit_arguments(entries: Sequence[CommitEntry]) -> list[str | bytes]:
    """Return the arguments that commit the entries."""
    lines: list[str] = []
    values: list[bytes] = []
    for entry in entries:
        check_entry(entry)
        claim, tokens, end = entry.claim, entry.tokens, entry.end
        if all(map(codec.is_plain, tokens)):
            ids = "".join([f" {token.id}" for token in tokens])
            packed = 0
        else:
            ids = ""
            packed = len(tokens)
            values += map(codec.pack_token, tokens)
        reason = "-" if end is None else codec.pack_reason(end)
        index = f"{entry.index}" if entry.waited_ms is None else f"{entry.index}@{entry.waited_ms}"
        lines.append(f"{entry.request_id} {claim.number} {claim.call} {index} {reason} {packed}{ids}")
        if end is not None:
            values.append(codec.pack_stop(end))
    return ["\n".join(lines), *values]


def read_request(body: bytes, arrival: bytes, submitted_ms: bytes) -> Request:
    """Build a request from its body and the two fields that the pool added."""
    return codec.unpack_body(body, arrival=int(arrival), submitted_ms=int(submitted_ms))


def read_all_claimed(items: Iterable[list[Any]], claim_call: str) -> tuple[tuple[Claimed, ...], list[CommitEntry]]:
    """Build the requests of a claim's reply.

    Returns: the requests, and an end for each one that cannot be read. Nobody could ever run such a request, and it
        must not keep the others of the reply from running.
    """
    claimed, damaged = [], []
    for request_id, *item in items:
        name, (number, *_) = request_id.decode(), item
        try:
            claimed.append(_read_claimed(name, item, claim_call))
        except DAMAGE as error:
            log.error("the record of %s is damaged, so the request ends: %r", name, error)
            length = len(item) - len(_CLAIMED_HEAD)
            end = End(FinishReason.ERROR, length)
            damaged.append(CommitEntry(request_id=name, claim=Claim(int(number), claim_call), index=length, end=end))
    return tuple(claimed), damaged


def _read_claimed(name: str, item: list[Any], claim_call: str) -> Claimed:
    number, arrival, submitted_ms, is_alone, slack_ms, body, *tokens = item
    request = read_request(body, arrival, submitted_ms)
    if request.id != name:
        raise ValueError(f"its body is that of {request.id}")
    return Claimed(
        request=request,
        claim=Claim(int(number), claim_call),
        log=tuple(map(codec.unpack_token, tokens)),
        is_alone=bool(is_alone),
        slack_ms=None if slack_ms == b"" else int(slack_ms),
    )


def read_end(fields: Mapping[bytes, bytes]) -> End:
    """Build the end from the fields of its entry."""
    return codec.unpack_end(fields[b"end"], fields[b"count"], fields[b"stop"])


def read_slices(
    asked: Sequence[tuple[str, int]], plain: bytes, *others: list[Any]
) -> Iterator[tuple[str, LogSlice | None]]:
    """Build the reply of `read`: a slice, or None for an unknown request, for each request that has one.

    Args:
        asked: request and start of each log, in the order of the call.
        plain, others: see read.lua.
    """
    for line in plain.splitlines():
        position, is_cut, *ids = map(int, line.split())
        request_id, start = asked[position]
        yield request_id, LogSlice(start, tuple(map(Token, ids)), None, is_cut=bool(is_cut))
    for position, *found in others:
        request_id, start = asked[position]
        try:
            yield request_id, _read_slice(start, *found) if found else None
        except DAMAGE as error:
            # For its readers the request is unknown. The other logs of the call are read.
            log.error("the log of %s is damaged: %r", request_id, error)
            yield request_id, None


def _read_slice(start: int, is_cut: int, *found: Any) -> LogSlice:
    """Args: found: the log's tokens, then the end as a list of its fields if it is there."""
    entries = list(found)
    end = codec.unpack_end(*entries.pop()) if entries and isinstance(entries[-1], list) else None
    return LogSlice(start, tuple(map(codec.unpack_token, entries)), end, is_cut=bool(is_cut))


def read_lengths(period: int, awake_ms: int, fields: Sequence[bytes]) -> PeriodLengths:
    """Build the counts of a period. Args: fields: names and values in turn. Raises: PoolUnavailable: they are none."""
    with _counts_of(period):
        counts = _read_counts(fields)
        cut = counts.pop("cut", 0)
        cells = {name.partition(",")[::2]: count for name, count in counts.items()}
        return PeriodLengths(
            age_ms=age_ms(period, awake_ms),
            cells={
                (_bin(prompt, length_bins.BIN_MAX), _bin(output, length_bins.BIN_MAX)): count
                for (prompt, output), count in cells.items()
            },
            cut=cut,
        )


def read_latencies(period: int, fields: Sequence[bytes]) -> PeriodLatencies:
    """Build the counts of a period. Args: fields: names and values in turn. Raises: PoolUnavailable: they are none."""
    with _counts_of(period):
        counts = _read_counts(fields)
        first_ms = counts.pop("first_ms")
        bins: dict[AnswerLatency, dict[int, int]] = {}
        for name, count in counts.items():
            latency, _, number = name.partition(",")
            bins.setdefault(LATENCIES[int(latency)], {})[_bin(number, latency_bins.BIN_MAX)] = count
        return PeriodLatencies(period=period, first_ms=first_ms, bins=bins)


@contextmanager
def _counts_of(period: int) -> Iterator[None]:
    """Turn what is wrong with counts into PoolUnavailable: Redis is shared with whoever has its password."""
    try:
        yield
    except (ValueError, LookupError) as error:
        raise PoolUnavailable(f"what the pool has counted in period {period} cannot be read: {error!r}") from error


def _read_counts(fields: Sequence[bytes]) -> dict[str, int]:
    """Raises: ValueError for a number that counts cannot reach."""
    counts = {name.decode(): int(count) for name, count in zip(fields[::2], fields[1::2], strict=True)}
    for name, count in counts.items():
        if not 0 <= count <= length_bins.COUNT_MAX:
            raise ValueError(f"{name[:40]} is {count}")
    return counts


def _bin(text: str, most: int) -> int:
    number = int(text)
    if not 0 <= number <= most:
        raise ValueError(f"there is no bin {number}")
    return number


def read_deadline_counts(awake_ms: int, *found: Any) -> DeadlineCounts:
    """Build the counts of deadlines.

    Args: found: number, requests in time and late ones of each period in turn.
    Raises: PoolUnavailable: they are no counts.
    """
    periods = zip(found[::3], found[1::3], found[2::3], strict=True)
    return DeadlineCounts(awake_ms=awake_ms, periods=tuple(_read_deadlines(*period) for period in periods))


def _read_deadlines(period: int, in_time: bytes, late: bytes) -> PeriodDeadlines:
    with _counts_of(period):
        counts = _read_counts((b"in_time", in_time, b"late", late))
        return PeriodDeadlines(period=period, in_time=counts["in_time"], late=counts["late"])


def read_order_stats(
    least_step_ms: bytes, pairs: Sequence[bytes] | None, due: Sequence[int], order: bytes
) -> OrderStats:
    """Build the counts by order of `stats`.

    Classes that only another release knows are left out: the next claim of this release builds the index again.
    Args:
        pairs: fields and values of the key `classes` in turn; None while the index is being built.
        order: arguments of a claim, see `read_order`.
    """
    classes: dict[OrderClass, int] | None = None
    if pairs is not None:
        named = ((_known_class(name.decode()), count) for name, count in zip(pairs[::2], pairs[1::2], strict=True))
        classes = {of: int(count) for of, count in named if of is not None}
    return OrderStats(classes=classes, due=tuple(due), least_step_ms=float(least_step_ms), order=read_order(order))


def _known_class(name: str) -> OrderClass | None:
    """Return the class of a name; None for a name that this release does not give."""
    try:
        return class_named(name)
    except ValueError:
        return None


def newer_records(meta: Mapping[str, Any]) -> int:
    """Count the records written under a number above the one in force. Args: meta: the fields of the key `meta`."""
    in_force, prefix = int(meta["schema"]), "written:"
    counts = {int(name.removeprefix(prefix)): int(count) for name, count in meta.items() if name.startswith(prefix)}
    return sum(count for schema, count in counts.items() if schema > in_force)
