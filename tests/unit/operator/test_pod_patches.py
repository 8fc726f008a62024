"""The user's patch of a pod: what it adds, what it takes away, and what it may not touch."""

import pytest

from orca.operator.domain.resource import BadSpec
from support.operator.deployments import deployment


@pytest.mark.parametrize(
    ("role", "container"),
    [("worker", "stage"), ("scheduler", "scheduler"), ("gateway", "gateway"), ("pool", "redis")],
)
def test_the_arguments_of_every_container_are_the_operators(role: str, container: str) -> None:
    patch = {"spec": {"containers": [{"name": container, "args": ["x"]}]}}
    with pytest.raises(BadSpec, match=f"{role}.podPatch: only the operator sets args of the container {container}"):
        deployment(**{role: {"podPatch": patch}})
