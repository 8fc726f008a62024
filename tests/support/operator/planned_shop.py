"""What shops that are plain data have in common: a resource in a cluster of paper, looked at when a test says so."""

import random
from typing import Any

from orca.operator.domain import names
from orca.operator.domain.resource import Json
from support.operator.clusters import FakeCluster
from support.operator.deployments import deployment


class PlannedShop:
    """Its subclass says what becomes of its parts and of its pool."""

    def __init__(self, seed: int, **spec: Any) -> None:
        self.chance = random.Random(seed)
        self.cluster = FakeCluster(deployment(**spec))
        self.lost = 0  # requests that nobody would run any more, counted at each look
        self.pool_problem: str | None = None

    def change(self, **spec: Any) -> None:
        self.cluster.deployment = deployment(generation=self.cluster.deployment.generation + 1, **spec)

    def schedulers(self) -> list[Json]:
        """Their StatefulSets, by name."""
        found = [each for (kind, _), each in sorted(self.cluster.objects.items()) if kind == "StatefulSet"]
        return [each for each in found if names.MODEL_LABEL in each["metadata"]["labels"]]
