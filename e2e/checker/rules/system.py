"""Rules about the whole system over a whole history. Pure; what cannot be seen is not judged."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from checker.history.answers import Call
from checker.rules.evidence import Evidence, Harm, Violation
from checker.rules.growth import does_not_grow

ROOM = {"open_files": 32.0}
"""How much more a system at rest may hold than before the load. Files: each process keeps the connections to Redis that
it once needed at a time, at most so many (ORCA_POOL_CONNECTIONS_MAX). What each fault leaves behind adds up to more.
"""


def refused_cost_nothing(calls: Sequence[Call], evidence: Evidence) -> Iterator[Violation]:
    """No iteration ran a request that nobody has an answer of.

    A call that broke before its headers, or whose gateway lost the pool, may have been accepted under a name that its
    client never learned: so many unknown requests are granted, and those of strangers.
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
    """Connections that broke without headers, and refusals by a gateway that had no answer from the pool."""
    broken = [one for one in call.connections.values() if one.answered is None and one.closed and one.closed.error]
    return len(broken) + sum(refusal.code == "pool_unavailable" for refusal in call.refused)


def claims_rise(evidence: Evidence) -> Iterator[Violation]:
    """Each request's claims rise in number, and each finds at least what the one before it found in the log."""
    for request, claims in evidence.claims.items():
        # In the order of their numbers: a frozen scheduler writes its line when others have claimed since.
        for earlier, later in pairwise(sorted(claims, key=lambda claim: claim.claim)):
            if later.claim <= earlier.claim or later.logged < earlier.logged:
                expected = f"{request}: after claim {earlier.claim} with {earlier.logged} tokens a higher one, no fewer"
                found = f"claim {later.claim} with {later.logged}"
                yield Violation(rule="claims_rise", harm=Harm.REVISED, expected=expected, found=found, at=later.at)


def appends_in_order(evidence: Evidence) -> Iterator[Violation]:
    """Along a log the claims that wrote it never fall, and each that wrote a token is one that a scheduler has had."""
    for request, log in evidence.logs.items():
        had = {claim.claim for claim in evidence.claims.get(request, ())}
        fell = [(earlier, later) for earlier, later in pairwise(log.claims) if later < earlier]
        strangers = set(log.claims[: len(log.tokens)]) - had if evidence.claims else set()
        if fell or strangers:
            expected = f"{request}: claims that never fall, out of {sorted(had)}"
            found = f"{list(log.claims)}"
            yield Violation(rule="appends_in_order", harm=Harm.REVISED, expected=expected, found=found, at=log.at)


def comes_to_rest(evidence: Evidence) -> Iterator[Violation]:
    """When all is over the system holds what it held before: slots, leases, keys, connections, files."""
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
    """No commit of a claim that is over is applied; no step of an epoch that is over runs, and none twice."""
    for found in evidence.offers.harmful if evidence.offers is not None else ():
        expected = "the pool and the stages refuse what is stale"
        yield Violation(rule="stale_work_is_refused", harm=Harm.REVISED, expected=expected, found=found)


def system_stays(evidence: Evidence) -> Iterator[Violation]:
    """Whatever dies, the system as a whole goes on."""
    if evidence.ended is not None:
        words = evidence.ended.words
        yield Violation(rule="system_stays", harm=Harm.LOST, expected="a system that goes on", found=words)


def checks_hold(evidence: Evidence) -> Iterator[Violation]:
    """What a disturbance asked by itself was answered as it must be; the rule's name is that of the question."""
    for check in evidence.checked:
        if not check.is_right:
            expected = f"{check.subject}: {check.expected}"
            yield Violation(rule=check.rule, harm=Harm.MISSTATED, expected=expected, found=check.found, at=check.at)


def system_violations(calls: Sequence[Call], evidence: Evidence) -> Iterator[Violation]:
    """All rules of this file."""
    yield from refused_cost_nothing(calls, evidence)
    yield from claims_rise(evidence)
    yield from appends_in_order(evidence)
    yield from comes_to_rest(evidence)
    yield from stale_work_is_refused(evidence)
    yield from system_stays(evidence)
    yield from checks_hold(evidence)
    yield from does_not_grow(evidence)
