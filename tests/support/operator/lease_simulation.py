"""Operators that want one Lease, on one virtual clock: each call may be lost, come late, or be frozen in its middle."""

import random
from collections import Counter
from typing import Any

import orjson

from orca.operator.cluster.api_calls import ApiServerError
from orca.operator.cluster.api_server import Leases
from orca.operator.cluster.leadership import Leadership
from orca.operator.domain.resource import Json
from orca.operator.plan.lease import LeaseTerms

OPERATORS = ("a", "b", "c")
DURATION_S = 15


def terms(identity: str) -> LeaseTerms:
    """Return the terms of an operator with this identity."""
    return LeaseTerms(namespace="system", name="orca", identity=identity, duration_s=DURATION_S)


def lease_object(identity: str, *, version: str = "1", **spec: Any) -> Json:
    """Return the Lease as the API server returns it."""
    metadata = {"name": "orca", "namespace": "system", "resourceVersion": version}
    return {"metadata": metadata, "spec": {"holderIdentity": identity, "leaseDurationSeconds": DURATION_S, **spec}}


class NoFaults(random.Random):
    """A random source with which no fault happens by itself."""

    def random(self) -> float:
        return 0.99


class LeaseSimulation:
    """`step` lets one operator do something. What it was allowed to write may be on its way until its time is over."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now_s = 0.0
        self.stored: Json | None = None
        self.overlaps: list[str] = []  # what must not be: two at a time, or one that goes on after another
        self.counts: Counter[str] = Counter()
        self.holders: list[str] = []
        self._acted: list[Leadership] = []  # in the order in which they did
        self._writes: dict[str, float] = {}  # until when a write of an operator may be on its way
        self._busy: set[str] = set()
        self._operators = {name: self.begin(name) for name in OPERATORS}

    def step(self) -> None:
        # Binary fractions, so that sums are exact.
        self.now_s += self.chance.choice([0.125, 0.5, 2.0])
        free = [name for name in OPERATORS if name not in self._busy]
        if free:
            self._act(self.chance.choice(free))
        self._observe()

    def meanwhile(self) -> None:
        """Let time pass during a call of an operator: mostly a moment, sometimes longer than the Lease lasts."""
        if len(self._busy) == len(OPERATORS) or self.chance.random() > 0.3:
            return
        for _ in range(self.chance.choice([1, 3, 30])):
            self.step()

    def _act(self, name: str) -> None:
        leadership = self._operators[name]
        if leadership.is_lost:
            self.counts["lost"] += 1
            self._operators[name] = self.begin(name)
            return
        choice = self.chance.random()
        if choice < 0.02:
            # What it sent before it was killed is there or not by the time a container starts again.
            self.counts["killed"] += 1
            self._writes.pop(name, None)
            self._operators[name] = self.begin(name)
            return
        self._busy.add(name)
        if choice < 0.04 and leadership.is_held:
            # All of its writes have been answered by then.
            self.counts["released"] += 1
            self._writes.pop(name, None)
            leadership.release()
            self._operators[name] = self.begin(name)
        else:
            try:
                leadership.renew()
            except ApiServerError:
                self.counts["failed"] += 1
        self._busy.discard(name)

    def begin(self, name: str) -> Leadership:
        """Each on a clock of its own."""
        offset_s = self.chance.randrange(1_000_000)
        return Leadership(FakeLeases(self), terms(name), lambda: self.now_s + offset_s)

    def _observe(self) -> None:
        """All holders begin a write now, which takes all of the time that it may."""
        for name, leadership in self._operators.items():
            if not leadership.is_held:
                continue
            others = {other: until for other, until in self._writes.items() if other != name and until > self.now_s}
            if others:
                self.overlaps.append(f"at {self.now_s:.1f} s {name} holds it, writes until {others}")
            if leadership not in self._acted[-1:]:
                if leadership in self._acted:
                    self.overlaps.append(f"at {self.now_s:.1f} s {name} goes on with what it began before another")
                self.counts["taken over"] += name not in self.holders[-1:]
                self.holders.append(name)
                self._acted.append(leadership)
            self._writes[name] = self.now_s + leadership.write_s()


class FakeLeases(Leases):
    """An API server that keeps one Lease, and refuses writes of an old version."""

    def __init__(self, simulation: LeaseSimulation) -> None:
        self.is_away = False
        self._simulation = simulation

    def read(self, *_: str) -> Json | None:
        self._suffer()
        found = orjson.loads(orjson.dumps(self._simulation.stored))
        self._suffer()
        return found

    def create(self, lease: Json) -> Json:
        return self._write(lease, None)

    def replace(self, lease: Json) -> Json:
        return self._write(lease, lease["metadata"]["resourceVersion"])

    def _write(self, lease: Json, version: str | None) -> Json:
        simulation = self._simulation
        self._suffer()
        stored = simulation.stored
        if version != (None if stored is None else stored["metadata"]["resourceVersion"]):
            raise ApiServerError(409, "it has changed")
        new = str(int(version or 0) + 1)
        written = orjson.dumps({**lease, "metadata": {**lease["metadata"], "resourceVersion": new}})
        simulation.stored = orjson.loads(written)
        self._suffer()
        return orjson.loads(orjson.dumps(simulation.stored))

    def _suffer(self) -> None:
        self._simulation.meanwhile()
        if self.is_away or self._simulation.chance.random() < 0.05:
            raise ApiServerError(0, "the connection is gone")
