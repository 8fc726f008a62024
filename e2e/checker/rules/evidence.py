"""What a history holds beside the calls: logs, expectations, and what the system's own logs said."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from checker.history.answers import Call, Choice, Said
from checker.history.records import (
    Checked,
    Claimed,
    Expected,
    Offers,
    Opening,
    PoolLog,
    Ran,
    Record,
    Resources,
    Sample,
    Strangers,
    SystemEnded,
)

Decode = Callable[[Sequence[int]], str]


class Harm(StrEnum):
    """What a violation did to whoever was served. The first five are the promise itself."""

    LOST = "lost"  # accepted and never ended, or ended with an error
    REPEATED = "repeated"
    SKIPPED = "skipped"
    REVISED = "revised"  # told once so and once otherwise
    CROSSED = "crossed"  # told of another request
    WRONG = "wrong"  # not what the oracle says
    MISSTATED = "misstated"  # text, usage, reasons or framing do not fit the tokens
    COSTLY = "costly"  # work was done for what was refused
    LEAKED = "leaked"  # the system did not come back to rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing that must not be. `story` is filled in by the verdict."""

    rule: str
    harm: Harm
    expected: str
    found: str
    call: str | None = None
    choice: int | None = None
    count: int = 1  # tokens, requests or things
    at: float | None = None  # of the event that shows it
    story: tuple[str, ...] = ()


def violation_in(
    rule: str,
    harm: Harm,
    call: Call,
    choice: Choice | None,
    expected: str,
    found: str,
    *,
    count: int = 1,
    at: Said | None = None,
) -> Violation:
    """Of a call or one of its choices. Args: at: the event that shows it."""
    return Violation(
        rule=rule,
        harm=harm,
        call=call.name,
        choice=None if choice is None else choice.number,
        expected=expected,
        found=found,
        count=count,
        at=None if at is None else at.event.at,
    )


@dataclass(slots=True)
class Evidence:
    """Sorted by what rules ask for."""

    logs: dict[str, PoolLog] = field(default_factory=dict)  # by the server's request id
    expected: dict[tuple[str, int], Expected] = field(default_factory=dict)  # by call and choice
    claims: dict[str, list[Claimed]] = field(default_factory=dict)  # by request id, in time
    ran: set[str] = field(default_factory=set)
    strangers: int = 0  # calls of clients that are not ours
    before: Resources | None = None
    after: Resources | None = None
    offers: Offers | None = None
    ended: SystemEnded | None = None
    checked: list[Checked] = field(default_factory=list)  # in time
    samples: list[Sample] = field(default_factory=list)  # in time
    least_life_s: float = 0.0  # of a process whose growth is judged
    decode: Decode | None = None  # token ids -> text; None leaves texts unjudged


def gather_evidence(records: Iterable[Record], decode: Decode | None = None) -> Evidence:
    evidence = Evidence(decode=decode)
    for record in records:
        match record:
            case Opening():
                evidence.least_life_s = record.settings.get("least_life_s", 0.0)
            case Sample():
                evidence.samples.append(record)
            case PoolLog():
                evidence.logs[record.request] = record
            case Expected():
                evidence.expected[record.call, record.choice] = record
            case Claimed():
                evidence.claims.setdefault(record.request, []).append(record)
            case Strangers():
                evidence.strangers += record.calls
            case Ran():
                evidence.ran.update(record.requests)
            case Resources(moment="before"):
                evidence.before = record
            case Resources():
                evidence.after = record
            case Offers():
                evidence.offers = record
            case Checked():
                evidence.checked.append(record)
            case SystemEnded():
                evidence.ended = record
    for claims in evidence.claims.values():
        claims.sort(key=lambda claim: claim.at)
    return evidence
