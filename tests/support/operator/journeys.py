"""Journeys of a resource: what its author does to it, one after another, and when the operator is done with each."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client

from orca.operator.cluster.api_server import Cluster
from orca.operator.domain import names
from orca.operator.domain.model_references import source_digest
from orca.operator.domain.resource import Json
from orca.operator.domain.slo.keys import plan_key, profile_key
from support.operator.api_server import ApiServer
from support.operator.deployments import deployment
from support.operator.end_state import State, end_state, is_at_rest
from support.operator.operator_runs import OperatorRuns
from support.operator.planned_files import ITERATION, RRA, plan_body, profile_body
from support.operator.pool_client import PoolClient
from support.operator.recording_proxy import At, Call, Moment, RecordingProxy
from support.operator.shop import POOL_SECRET, WITHIN_S, WORKER_IMAGE, Shop
from support.waiting import wait_until

ON_HUB = {"uri": "hf://org/model", "cache": {"sizeGiB": 1}}
IN_IMAGE = {"uri": "file:///m", "cache": None}
OF_THE_TEST = {"external": {"urlSecret": {"name": POOL_SECRET}}}
"""A pool that answers."""
CYCLE = {"encodeBatch": 4, "decodeSteps": 8}
LOOKS = 2
"""An operator is quiet when it has begun this many reconciles since its last write: the first found nothing to do."""


@dataclass(frozen=True, slots=True)
class Journey:
    """A change of a resource, and how it is made."""

    name: str
    begin: Callable[[Shop], None]


def creation(**spec: Any) -> Journey:
    """Return the journey that creates a resource, with a pool of its own unless the spec names another."""
    return Journey("create", lambda shop: shop.create(**{"pool": {}, **spec}))


JOURNEYS = (
    creation(),
    # Schedulers of both policies read the ConfigMap of bounds meanwhile.
    Journey("roll", lambda shop: shop.edit(parallelism={"stages": 2}, scheduler={"policy": "rra", "rra": CYCLE})),
    Journey("scale up", lambda shop: shop.edit(replicas=3)),
    Journey("change", lambda shop: shop.edit(scheduler={"maxBatchSize": 8, "prefetch": 0}, gateway={"replicas": 2})),
    Journey("scale down", lambda shop: shop.edit(replicas=1)),
    Journey("suspend", lambda shop: shop.edit(suspend=True)),
)
MODEL_JOURNEYS = (
    creation(pool=OF_THE_TEST),
    Journey("fetch", lambda shop: shop.edit(model=ON_HUB)),
    Journey("let the volume go", lambda shop: shop.edit(model=IN_IMAGE, deletionPolicy="Delete")),
)
"""Changes with a pool that answers: how a model is changed depends on the pool's answers."""


def slots(number: int, *, promised: int, **spec: Any) -> Journey:
    """Args: promised: what the pool must promise before it; 1024 to begin with."""

    def begin(shop: Shop) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pool = PoolClient(shop.pool_login(), shop.namespace, Path(folder))
            assert pool.form("r1", max(shop.generations()), slots=1024) == promised
        shop.edit(scheduler={"kvSlots": number}, **spec)

    return Journey(f"{number} slots", begin)


SLOTS_JOURNEYS = (
    creation(pool=OF_THE_TEST, scheduler={"kvSlots": 1024}, replicas=2),
    slots(512, promised=1024),
    slots(256, promised=512, parallelism={"stages": 2}),
    slots(2048, promised=256),
)
"""Changes with a pool that answers. It gets the lower number of slots before any scheduler does."""


GOAL = {"latencyMs": 8000, "devices": 4, "workload": {"lengths": "8/8"}}


def goal(planned: Json, **changes: Any) -> Journey:
    """Return the journey to a plan whose Jobs have left their results already. Args: changes: of the goal."""

    def begin(shop: Shop) -> None:
        slo = {**GOAL, **changes}
        wanted = deployment(**OF_THE_JOURNEY, slo=slo)
        profile = names.profile("shop", profile_key(wanted, WORKER_IMAGE))
        plan = names.plan("shop", plan_key(wanted, WORKER_IMAGE))
        with tempfile.TemporaryDirectory() as folder:
            pool = PoolClient(shop.pool_login(), shop.namespace, Path(folder))
            pool.do(lambda one: one.keep_result(profile, profile_body()))
            pool.do(lambda one: one.keep_result(plan, plan_body(planned)))
        shop.edit(slo=slo)

    return Journey(f"goal {changes}", begin)


OF_THE_JOURNEY: Json = {"model": {"uri": "file:///m"}, "pool": OF_THE_TEST}
GOAL_JOURNEYS = (
    creation(pool=OF_THE_TEST),
    goal(ITERATION),
    goal(RRA, latencyMs=4000),
    Journey("no goal", lambda shop: shop.edit(slo=None)),
)
"""Changes with a pool that has the results of Jobs: a plan, another one, and none."""


class JourneyRunner:
    """One resource in a namespace of its own, with its operator behind a recording proxy."""

    def __init__(self, server: ApiServer, proxy: RecordingProxy, runs: OperatorRuns, namespace: str) -> None:
        self.shop = Shop(server, namespace)
        self.cluster = Cluster(server.api())
        self.proxy, self.runs = proxy, runs

    def make(self, journey: Journey, fatal_write: At | None, moment: Moment) -> Call | None:
        """Run the journey until the operator is quiet or dead.

        Args: fatal_write: the write at which it dies; None lets it live.
        Returns: that write; None when it made no such write, and lives.
        """
        self.proxy.begin(None if fatal_write is None else (fatal_write, moment, self._kill))
        journey.begin(self.shop)
        wait_until(lambda: not self.runs.is_alive or self.is_quiet(), WITHIN_S, lambda: self._story(journey))
        return self.proxy.record.struck

    def make_in_vain(self, journey: Journey, write: int, moment: Moment) -> Call | None:
        """Somebody deletes the resource at a write, and the operator goes on with what it was doing, until it is quiet.

        Returns: that write; None when it made fewer, and the resource is still there.
        """
        self.proxy.begin((write, moment, self._delete))
        journey.begin(self.shop)
        wait_until(lambda: self._is_in_vain() or self.is_quiet(), WITHIN_S, lambda: self._story(journey))
        return self.proxy.record.struck

    def recover(self, journey: Journey) -> None:
        """A new operator, until it is quiet."""
        self.proxy.begin()
        self.runs.start()
        wait_until(self.is_quiet, WITHIN_S, lambda: self._story(journey))

    def delete_while_no_operator_runs(self) -> None:
        """Delete the resource, and wait until a new operator has seen that it is gone."""
        self.runs.kill()
        self.shop.delete()
        self.proxy.begin()
        self.runs.start()
        wait_until(lambda: self.proxy.record.lists_at_rest >= LOOKS, WITHIN_S, lambda: self.runs.log[-2000:])

    def children(self) -> set[tuple[str, str]]:
        """Kinds and names."""
        found = self.cluster.children(self.shop.namespace, "shop")
        return {(each["kind"], each["metadata"]["name"]) for each in found}

    def is_quiet(self) -> bool:
        """Return whether the operator is quiet and the resource exists in its wanted state."""
        return self.proxy.record.looks_at_rest >= LOOKS and self.shop.condition("Progressing")[0] == "False"

    def is_at_rest(self) -> bool:
        return is_at_rest(self.cluster, self.shop.namespace)

    def state(self) -> State:
        return end_state(self.cluster, self.shop.namespace)

    def _kill(self) -> bool:
        self.runs.kill()
        return False

    def _delete(self) -> bool:
        self.shop.delete()
        return True

    def _is_in_vain(self) -> bool:
        """Return whether the resource is gone and the operator writes nothing for it any more."""
        record = self.proxy.record
        return record.struck is not None and record.lists_at_rest >= LOOKS

    def _story(self, journey: Journey) -> str:
        writes = [call.what for call in self.proxy.record.writes]
        found = self.state().get("OrcaDeployment")
        return f"{self.shop.namespace}, {journey.name}: wrote {writes}\n{found}\n{self.runs.log[-2000:]}"


@contextlib.contextmanager
def journey_runner(server: ApiServer, folder: Path, namespace: str, login: dict[str, str]) -> Iterator[JourneyRunner]:
    """Its operator lives; there is no resource yet, but a volume for each claim that it will make.

    Args: login: of a pool that answers; those that the operator makes have no process.
    """
    core = client.CoreV1Api(server.api())
    core.create_namespace({"metadata": {"name": namespace}})
    core.create_namespaced_secret(namespace, {"metadata": {"name": POOL_SECRET}, "stringData": login})
    fetched = names.model("shop", source_digest(deployment(model=ON_HUB).spec.model))
    for claim in (names.pool("shop"), fetched):
        core.create_persistent_volume(_volume(namespace, claim))
    with RecordingProxy(server) as proxy:
        runs = OperatorRuns(server, proxy, folder / namespace, namespace)
        runs.start()
        try:
            yield JourneyRunner(server, proxy, runs, namespace)
        finally:
            runs.kill()
            # Nobody waits for its end: it makes room on the simulated nodes.
            core.delete_namespace(namespace)


def _volume(namespace: str, claim: str) -> dict[str, object]:
    """Return a simulated volume for one claim."""
    return {
        "metadata": {"name": f"{namespace}-{claim}"},
        "spec": {
            "capacity": {"storage": "64Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": "/nowhere"},
            "claimRef": {"namespace": namespace, "name": claim},
        },
    }
