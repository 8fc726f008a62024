"""The policies by their names."""

from orca.scheduler.policy.iteration import IterationPolicy
from orca.scheduler.policy.policy import Policy
from orca.scheduler.policy.request_level import RequestLevelPolicy
from orca.scheduler.policy.rra import RoundRobinPolicy

POLICIES = ("iteration", "request_level", "rra")


def policy_of(name: str, baseline: RequestLevelPolicy) -> Policy:
    """Return the policy of a name. Args: baseline: the policy named `request_level`."""
    match name:
        case "iteration":
            return IterationPolicy()
        case "rra":
            return RoundRobinPolicy()
    assert name == "request_level", name
    return baseline
