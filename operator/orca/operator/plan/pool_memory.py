"""The memory limit of the running Redis, which somebody else may have set: pure.

The spec's own limit is checked when it is read. A LimitRange gives a limit to a container that has none, and a webhook
may do the same.
"""

from orca.operator.domain import names
from orca.operator.domain.objects import is_going
from orca.operator.domain.observation import Observation
from orca.operator.domain.problems import Problem
from orca.operator.domain.quantity import is_less
from orca.operator.domain.resource import REDIS

LIMIT_TOO_LOW = "PoolMemoryLimit"


def find_problem(observation: Observation) -> Problem | None:
    """Return the problem of a managed Redis that its container's limit will kill; None if there is none."""
    managed = observation.spec.pool.managed
    if observation.spec.pool.external is not None:
        return None
    for pod in observation.children.pods(names.POOL):
        containers = [] if is_going(pod) else pod.get("spec", {}).get("containers") or []
        for container in containers:
            limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
            if container["name"] == REDIS and is_less(limit, managed.least_limit):
                return Problem(
                    LIMIT_TOO_LOW,
                    f"the limits of pod {pod['metadata']['name']} allow Redis {limit} of memory, and it may take"
                    f" {managed.least_limit} when it has filled its {managed.memory_mib} MiB, then it is killed; if a"
                    " LimitRange or a webhook sets that limit, set pool.resources.limits.memory; or lower"
                    " pool.managed.memoryMiB",
                )
    return None
