"""Judges a history: counts instead of pass or fail, and a story for each violation. A function of the records alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from checker.history.answers import Call, gather_calls, has_grammar
from checker.history.records import Checked, Event, Fault, HandedOver, Opening, Record, to_line
from checker.rules.content import CONTENT_RULES, EVIDENCE_RULES
from checker.rules.evidence import Decode, Evidence, Harm, Violation, gather_evidence
from checker.rules.stream import STREAM_RULES
from checker.rules.system import system_violations

STORY_RECORDS = 6
"""Number of records in a story before and after the one that shows the violation."""

STORY_CHARACTERS = 220


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of judging a history."""

    seed: int | None
    requests: int  # accepted, one per choice
    tokens: int  # received by clients, each index once
    refused: int  # attempts that a gateway refused
    unaccepted: int  # calls that never had an answer
    resumed: int  # connections that continued a broken one
    faults: int
    unaimed: int  # faults without calls in flight, which prove nothing
    inside_grammars: int  # faults after the first token and before the end of a stream with a grammar
    unproven: tuple[str, ...]  # rules without evidence
    harms: dict[str, int]
    offers: dict[str, int]  # commits and steps offered to pool and stages, also stale ones; empty if not recorded
    handovers: int  # of parts, from one release to another
    checks: dict[str, int]  # checks of the disturbance itself, by rule
    error_ends: int
    violations: tuple[Violation, ...]

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(records: Sequence[Record], decode: Decode | None = None) -> Verdict:
    """Apply all rules to all records.

    Args:
        decode: token ids -> text by the model's tokenizer; None leaves texts unjudged.
    """
    calls = gather_calls(records)
    evidence = gather_evidence(records, decode)
    accepted = [call for call in calls if call.is_accepted or call.is_abandoned or _has_failed(call)]
    violations = [found for call in accepted for found in _of_call(call, evidence)]
    violations += system_violations(calls, evidence)
    return _verdict(calls, accepted, violations, evidence, records)


def judge_system(calls: Sequence[Call], records: Sequence[Record]) -> Verdict:
    """Apply only the rules over the whole system; the verdict counts no requests.

    Args:
        calls: all calls of the history; their events may be left out.
        records: the records that belong to no call.
    """
    evidence = gather_evidence(records)
    return _verdict([], [], list(system_violations(calls, evidence)), evidence, records)


def combine(first: Verdict, second: Verdict) -> Verdict:
    """Combine the verdicts over two histories without a common call, or over calls and system of one history."""
    return Verdict(
        seed=second.seed if first.seed is None else first.seed,
        requests=first.requests + second.requests,
        tokens=first.tokens + second.tokens,
        refused=first.refused + second.refused,
        unaccepted=first.unaccepted + second.unaccepted,
        resumed=first.resumed + second.resumed,
        faults=first.faults + second.faults,
        unaimed=first.unaimed + second.unaimed,
        inside_grammars=first.inside_grammars + second.inside_grammars,
        unproven=tuple(rule for rule in first.unproven if rule in second.unproven),
        harms={name: count + second.harms[name] for name, count in first.harms.items()},
        offers=first.offers or second.offers,
        handovers=first.handovers + second.handovers,
        checks=dict(Counter(first.checks) + Counter(second.checks)),
        error_ends=first.error_ends + second.error_ends,
        violations=(*first.violations, *second.violations),
    )


def _verdict(
    calls: Sequence[Call],
    accepted: Sequence[Call],
    violations: Sequence[Violation],
    evidence: Evidence,
    records: Sequence[Record],
) -> Verdict:
    faults = [record for record in records if isinstance(record, Fault)]
    choices = [choice for call in accepted for choice in call.choices()]
    return Verdict(
        seed=next((record.seed for record in records if isinstance(record, Opening)), None),
        requests=len(choices),
        tokens=sum(len(choice.tokens) for choice in choices),
        refused=sum(len(call.refused) for call in calls),
        unaccepted=len(calls) - len(accepted),
        resumed=sum(
            connection.answered is not None and connection.answered.cursor is not None
            for call in calls
            for connection in call.connections.values()
        ),
        faults=len(faults),
        unaimed=sum(not fault.in_flight for fault in faults),
        inside_grammars=_inside_grammars(faults, accepted),
        unproven=_unproven(evidence),
        harms={harm.value: sum(found.count for found in violations if found.harm is harm) for harm in Harm},
        offers={} if evidence.offers is None else evidence.offers.counts,
        handovers=sum(isinstance(record, HandedOver) for record in records),
        checks=dict(Counter(record.rule for record in records if isinstance(record, Checked))),
        error_ends=sum(found.rule == "has_no_error" for found in violations),
        violations=tuple(_with_story(found, records) for found in violations),
    )


def _inside_grammars(faults: Sequence[Fault], calls: Sequence[Call]) -> int:
    """Count the faults in the middle of an answer with a grammar, as its client saw it."""
    spans = [
        (choice.ordered[0].record.at, choice.end.record.at)
        for call in calls
        if has_grammar(call.body)
        for choice in call.choices()
        if choice.tokens and choice.end is not None
    ]
    return sum(any(first <= fault.at < end for first, end in spans) for fault in faults)


def table(verdict: Verdict) -> str:
    """Return the verdict for people: counts, then each violation with its story."""
    counts = ", ".join(f"{name} {count}" for name, count in verdict.harms.items())
    done = f"{verdict.faults} faults ({verdict.unaimed} with nothing in flight)"
    lines = [
        f"seed {verdict.seed}: {verdict.requests} requests, {verdict.tokens} tokens, {done}",
        f"  {counts}; error ends {verdict.error_ends}",
        f"  refused {verdict.refused}, never answered {verdict.unaccepted}, resumed {verdict.resumed}",
    ]
    if verdict.inside_grammars:
        lines.append(f"  {verdict.inside_grammars} faults in the middle of an answer with a grammar")
    if verdict.offers:
        lines.append("  " + ", ".join(f"{name} {count}" for name, count in sorted(verdict.offers.items())))
    if verdict.handovers:
        checks = ", ".join(f"{rule} {count}" for rule, count in sorted(verdict.checks.items()))
        lines.append(f"  {verdict.handovers} hand-overs between releases; checks: {checks}")
    if verdict.unproven:
        lines.append(f"  rules without evidence: {', '.join(verdict.unproven)}")
    for found in verdict.violations:
        where = "" if found.call is None else f" {found.call}" + ("" if found.choice is None else f".{found.choice}")
        lines.append(f"\n{found.rule}{where}: {found.harm.value}; expected {found.expected}; found {found.found}")
        lines += [f"    {line}" for line in found.story]
    return "\n".join(lines)


def tokenizer_decode(path: Path) -> Decode:
    """Return a function from token ids to text, by a tokenizer.json."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _of_call(call: Call, evidence: Evidence) -> Iterator[Violation]:
    for rule in (*STREAM_RULES, *CONTENT_RULES):
        yield from rule(call)
    for evidence_rule in EVIDENCE_RULES:
        yield from evidence_rule(call, evidence)


def _has_failed(call: Call) -> bool:
    """Was the call answered with an error that is not a refusal?"""
    return any(event.error for event in call.events)


def _unproven(evidence: Evidence) -> tuple[str, ...]:
    seen = {
        "equals_log": evidence.logs,
        "equals_oracle": evidence.expected,
        "claims_rise": evidence.claims,
        "appends_in_order": any(log.claims for log in evidence.logs.values()),
        "refused_cost_nothing": evidence.ran,
        "comes_to_rest": evidence.before and evidence.after,
        "stale_work_is_refused": evidence.offers,
        "steps_fit": evidence.news,
        "does_not_grow": evidence.samples,
        "text_is_join": evidence.decode,
    }
    return tuple(rule for rule, what in seen.items() if not what)


def _with_story(found: Violation, records: Sequence[Record]) -> Violation:
    """Add the records of the same call around the event, and the faults between them."""
    if found.call is None:
        return found
    own = [record for record in records if getattr(record, "call", found.call) == found.call]
    told = [record for record in own if isinstance(record, Fault) or hasattr(record, "call")]
    ends = found.at if found.at is not None else max((r.at for r in told if isinstance(r, Event)), default=0.0)
    place = next((i for i, record in enumerate(told) if record.at >= ends), len(told))
    near = told[max(0, place - STORY_RECORDS) : place + STORY_RECORDS]
    return replace(found, story=tuple(to_line(record)[:STORY_CHARACTERS] for record in near))
