"""Rules about the whole system over a whole history. Pure; a rule without evidence judges nothing."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from checker.history.answers import Call
from checker.rules.evidence import Evidence, Harm, Violation
from checker.rules.growth import does_not_grow

ROOM = {"open_files": 32.0}
"""Extra resources that a system at rest may hold, compared with before the load. Files: each process keeps up to
ORCA_POOL_CONNECTIONS_MAX connections to Redis that it once needed at a time. A leak per fault would add up to more.
"""

MISFIT = re.compile(r"EngineError: .*\brequest \d+\b")
"""The error of a rank that is told something of a request which does not fit what it holds. No fault explains that: a
rank in an epoch gets each step once, in order."""


def refused_cost_nothing(calls: Sequence[Call], evidence: Evidence) -> Iterator[Violation]:
    """Check that no iteration ran a refused request: every request that ran must belong to an answered call.

    A call that broke before its headers, or whose gateway lost the pool, may have been accepted with an id that its
    client never learned. One unknown request is allowed for each such call, and for each call of strangers.
    """
    known = {call.request_id for call in calls if call.request_id}
    unknown = {request.rpartition(".")[0] for request in evidence.ran} - known
    nameless = sum(_nameless(call) for call in calls) + evidence.strangers
    if len(unknown) > nameless:
        found = f"{len(unknown)} unknown: {', '.join(sorted(unknown)[:3])}"
        expected = f"at most {nameless} requests that no client knows"
        yield Violation(
            rule="refused_cost_nothing",
            harm=Harm.COSTLY,
            expected=expected,
            found=found,
            count=len(unknown) - nameless,
        )


def _nameless(call: Call) -> int:
    """Count connections that broke without headers, and refusals by a gateway that had no answer from the pool."""
    broken = [one for one in call.connections.values() if one.answered is None and one.closed and one.closed.error]
    return len(broken) + sum(refusal.code == "pool_unavailable" for refusal in call.refused)


def claims_rise(evidence: Evidence) -> Iterator[Violation]:
    """Check that each request's claims have rising numbers, and never find fewer tokens in the log than before."""
    for request, claims in evidence.claims.items():
        # In the order of their numbers: a frozen scheduler may write its line after a later claim by another one.
        for earlier, later in pairwise(sorted(claims, key=lambda claim: claim.claim)):
            if later.claim <= earlier.claim or later.logged < earlier.logged:
                expected = f"{request}: after claim {earlier.claim} with {earlier.logged} tokens a higher one, no fewer"
                found = f"claim {later.claim} with {later.logged}"
                yield Violation(rule="claims_rise", harm=Harm.REVISED, expected=expected, found=found, at=later.at)


def appends_in_order(evidence: Evidence) -> Iterator[Violation]:
    """Check that claim numbers never fall along a log, and that a scheduler had each claim that wrote a token."""
    for request, log in evidence.logs.items():
        had = {claim.claim for claim in evidence.claims.get(request, ())}
        fell = [(earlier, later) for earlier, later in pairwise(log.claims) if later < earlier]
        strangers = set(log.claims[: len(log.tokens)]) - had if evidence.claims else set()
        if fell or strangers:
            expected = f"{request}: claims that never fall, out of {sorted(had)}"
            found = f"{list(log.claims)}"
            yield Violation(rule="appends_in_order", harm=Harm.REVISED, expected=expected, found=found, at=log.at)


def comes_to_rest(evidence: Evidence) -> Iterator[Violation]:
    """Check that at the end the system holds no more than before: slots, leases, keys, connections, files."""
    if evidence.before is None or evidence.after is None:
        return
    for name, after in sorted(evidence.after.held.items()):
        before = evidence.before.held.get(name, 0.0)
        if after > before + ROOM.get(name.partition(" ")[0], 0.0):
            yield Violation(
                rule="comes_to_rest",
                harm=Harm.LEAKED,
                expected=f"{name}: {before:g} as before",
                found=f"{after:g}",
                count=int(after - before),
            )


def stale_work_is_refused(evidence: Evidence) -> Iterator[Violation]:
    """Check that no commit of an ended claim is applied, no step of an ended epoch runs, and no step runs twice."""
    for found in evidence.offers.harmful if evidence.offers is not None else ():
        expected = "the pool and the stages refuse stale work"
        yield Violation(rule="stale_work_is_refused", harm=Harm.REVISED, expected=expected, found=found)


def steps_fit(evidence: Evidence) -> Iterator[Violation]:
    """Check that no step names slots, blocks or tokens of a request that differ from what a rank holds."""
    misfits = [item for item in evidence.news if item.what == "broke" and MISFIT.search(item.reason or "")]
    if misfits:
        first = misfits[0]
        expected = f"steps that fit what {first.group} holds"
        found = f"{first.reason} in epoch {first.epoch}"
        yield Violation(
            rule="steps_fit", harm=Harm.LOST, expected=expected, found=found, count=len(misfits), at=first.at
        )


def system_stays(evidence: Evidence) -> Iterator[Violation]:
    """Check that the system as a whole never ends by itself."""
    if evidence.ended is not None:
        words = evidence.ended.words
        yield Violation(rule="system_stays", harm=Harm.LOST, expected="a system that keeps running", found=words)


def checks_hold(evidence: Evidence) -> Iterator[Violation]:
    """Report the failed checks of the disturbance itself; each check names its own rule."""
    for check in evidence.checked:
        if not check.is_right:
            expected = f"{check.subject}: {check.expected}"
            yield Violation(rule=check.rule, harm=Harm.MISSTATED, expected=expected, found=check.found, at=check.at)


def system_violations(calls: Sequence[Call], evidence: Evidence) -> Iterator[Violation]:
    """Apply all rules of this file."""
    yield from refused_cost_nothing(calls, evidence)
    yield from claims_rise(evidence)
    yield from appends_in_order(evidence)
    yield from comes_to_rest(evidence)
    yield from stale_work_is_refused(evidence)
    yield from steps_fit(evidence)
    yield from system_stays(evidence)
    yield from checks_hold(evidence)
    yield from does_not_grow(evidence)
