"""The evidence of a history besides its calls: pool logs, expectations, and reports from the system's own logs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from checker.history.answers import Call, Choice, ParsedEvent
from checker.history.records import (
    Checked,
    Claimed,
    Expected,
    GroupNews,
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
    """The harm that a violation does to clients. The first five break the promise itself."""

    LOST = "lost"  # accepted and never ended, or ended with an error
    REPEATED = "repeated"
    SKIPPED = "skipped"
    REVISED = "revised"  # sent twice with different content
    CROSSED = "crossed"  # belongs to another request
    WRONG = "wrong"  # differs from the oracle
    MISSTATED = "misstated"  # text, usage, reasons or framing do not match the tokens
    COSTLY = "costly"  # the system worked for a refused request
    LEAKED = "leaked"  # the system did not return to rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One violation of a rule. The verdict fills in `story`."""

    rule: str
    harm: Harm
    expected: str
    found: str
    call: str | None = None
    choice: int | None = None
    count: int = 1  # tokens, requests or resources
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
    at: ParsedEvent | None = None,
) -> Violation:
    """Return the violation by a call or one of its choices. Args: at: the event that shows it."""
    return Violation(
        rule=rule,
        harm=harm,
        call=call.name,
        choice=None if choice is None else choice.number,
        expected=expected,
        found=found,
        count=count,
        at=None if at is None else at.record.at,
    )


@dataclass(slots=True)
class Evidence:
    """The records of a history in the form that rules need."""

    logs: dict[str, PoolLog] = field(default_factory=dict)  # by the server's request id
    expected: dict[tuple[str, int], Expected] = field(default_factory=dict)  # by call and choice
    claims: dict[str, list[Claimed]] = field(default_factory=dict)  # by request id, in time
    news: list[GroupNews] = field(default_factory=list)  # in time
    ran: set[str] = field(default_factory=set)
    strangers: int = 0  # calls of clients without records
    before: Resources | None = None
    after: Resources | None = None
    offers: Offers | None = None
    ended: SystemEnded | None = None
    checked: list[Checked] = field(default_factory=list)  # in time
    samples: list[Sample] = field(default_factory=list)  # in time
    least_life_s: float = 0.0  # growth is judged for processes that lived at least this long
    decode: Decode | None = None  # token ids -> text; None leaves texts unjudged


def gather_evidence(records: Iterable[Record], decode: Decode | None = None) -> Evidence:
    """Return the evidence of a history."""
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
            case GroupNews():
                evidence.news.append(record)
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
