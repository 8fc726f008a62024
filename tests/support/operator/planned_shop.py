"""The base of simulated deployments: a resource in a fake cluster, reconciled when a test says so."""

import random
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.resource import Json
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment


class PlannedShop:
    """A simulated deployment; its subclass says how its parts and its pool change."""

    def __init__(self, seed: int, **spec: Any) -> None:
        self.chance = random.Random(seed)
        self.cluster = FakeCluster(deployment(**spec))
        self.lost = 0  # requests that no group would run any more, counted at each reconcile
        self.pool_problem: str | None = None

    def change(self, **spec: Any) -> None:
        self.cluster.deployment = deployment(generation=self.cluster.deployment.generation + 1, **spec)

    def schedulers(self) -> list[Json]:
        """Return the schedulers' StatefulSets, by name."""
        found = [each for (kind, _), each in sorted(self.cluster.objects.items()) if kind == "StatefulSet"]
        return [each for each in found if names.MODEL_LABEL in each["metadata"]["labels"]]
