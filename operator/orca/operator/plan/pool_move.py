"""An external pool whose Secret names another Redis than before: may the parts follow? Pure.

Requests that were accepted are in the Redis that the parts use. If the parts went to another one, those requests would
never run. So the parts stay where they are, until one of these holds:

- The other Redis holds the same requests: the model in force there is the one that the running groups serve. Somebody
  has moved the data, or the same Redis has another address.
- The Redis before holds no request that has not ended, the resource is suspended, and none of its gateways and
  schedulers is left to put one there.

The URL in use is an annotation of the gateways' Deployment and of the schedulers' StatefulSets (facts.py). Their pods
have the URL as a plain value, so a pod that restarts does not follow the Secret by itself. A Secret that is missing or
has no URL that parts accept changes nothing (plan.py), so the annotation stays.
"""

from orca.operator.domain import names
from orca.operator.domain.objects import is_pod_ready
from orca.operator.domain.observation import Observation, PoolStatus
from orca.operator.render import pool


def url_left(observation: Observation) -> str | None:
    """Return the URL of the Redis that the parts use, if the Secret names another one; otherwise None."""
    used, named = observation.pool_in_use, pool.external_url(observation.deployment, observation.pool_secret)
    return None if named is None or used == named else used


def judge(observation: Observation, named: PoolStatus, left: PoolStatus) -> PoolStatus:
    """Return the status of the pool for the plan.

    Args:
        observation: of a resource whose Secret names another Redis than the one in use.
        named: answer of the Redis that the Secret names now.
        left: answer of the one in use.
    Returns: `named` if the parts may follow; otherwise a status that says why not.
    """
    if _holds_the_same(observation, named) or (_is_at_rest(observation) and _is_empty(left)):
        return named
    target = pool.external_url(observation.deployment, observation.pool_secret)
    return PoolStatus(
        problem=(
            f"the Secret of the pool names another Redis, {target}, but the requests are in {observation.pool_in_use}:"
            f" {_why_not(left)}; gateways and schedulers stay with it. Put the URL back, or suspend the"
            " resource when all requests have ended, or make a new OrcaDeployment for the other Redis"
        ),
        has_moved=True,
    )


def _holds_the_same(observation: Observation, named: PoolStatus) -> bool:
    """Compare generations: they come from the clock, so those of two pools differ."""
    served = {
        observation.generations.get(digest, 0)
        for group, digest in observation.model_digests.items()
        if any(map(is_pod_ready, observation.children.pods(names.SCHEDULER, group=group)))
    }
    return named.problem is None and named.generation is not None and named.generation in served - {0}


def _is_at_rest(observation: Observation) -> bool:
    """Return whether nobody can put a request into the Redis before."""
    users = [pod for role in (names.GATEWAY, names.SCHEDULER) for pod in observation.children.pods(role)]
    return observation.spec.suspend and not users


def _is_empty(left: PoolStatus) -> bool:
    return left.problem is None and not (left.queued or left.running or left.replaced_unfinished)


def _why_not(left: PoolStatus) -> str:
    if left.problem is not None:
        return f"it does not answer, so nobody knows how many ({left.problem})"
    unfinished = left.queued + left.running + left.replaced_unfinished
    if unfinished:
        return f"{unfinished} of them have not ended"
    return "gateways may still accept some"
