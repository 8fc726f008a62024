"""Poison: a request that breaks every group that runs it must end, and must not take other requests with it.

The pool gives a dead group's requests to the next group, so one request whose computation crashes an engine would bring
down group after group for ever. Only a group's survival without a request shows that the request was the cause. So each
record keeps two fields, absent in older records, which means none: `trial`, set by a claim, and `failures`.

    claim                                                     trial set
    first commit of that claim                                trial cleared, failures = 0: it ran and did no harm
    give back, leave, sweep of a lease, gap in a commit,      trial cleared, failures kept
      enter after a death from outside
    enter that blames it: the engine failed from inside       a set trial: failures + 1; without one: nothing
    failures = FAILURES_IN_COMPANY                            a claim marks it to run alone (`is_alone`)
    failures = FAILURES_MAX                                   END(error), in the enter that counts the last one

From inside means: a rank ended by itself (exception, fault, out of memory), hung until its controller killed it, or a
step exceeded its bound. Some failures come from outside and blame nobody: SIGKILL or SIGTERM without a count of
out-of-memory kills, a lost pod, a lost link, and the scheduler's own death. Otherwise a rollout that kills pods would
end innocent requests.

Reasons for each part:
- Blame names requests by their claims, and only those that ran in a step that never came back. A claim whose reply was
  lost, and a request that waited in the group for its first step, harmed nobody.
- Blame comes with the enter that gives the requests back, so it is counted once for each death, whatever is repeated.
- Two failures in company: one may well be a neighbour's fault. The neighbours of a poisoned request reach two as
  well; the first commit alone then acquits each of them.
- Alone means alone in the steps in flight, not in the group: others keep their slots and pause, and acquittal costs
  each suspect a prompt and a step. If the group were emptied instead, the next suspect would wait for the end of the
  one before, which goes on when it is acquitted. Fifteen requests of 200 tokens whose engine had failed twice took
  61 s that way, and take 5 s this way (20 ms a step, virtual time).
- Three failures alone: chance, or a machine about to die, is no longer likely.
- A request is never suspected for anything before its last commit. One that breaks its engine in every second step
  gains a token each time, and ends by its length.
"""

FAILURES_IN_COMPANY = 2
FAILURES_MAX = 5


def is_alone(failures: int) -> bool:
    """Return true if a request with so many failures must run alone until its next commit."""
    return failures >= FAILURES_IN_COMPANY


def lua() -> str:
    """Return the constants for the head of each script."""
    return f"local FAILURES_IN_COMPANY, FAILURES_MAX = {FAILURES_IN_COMPANY}, {FAILURES_MAX}\n"
