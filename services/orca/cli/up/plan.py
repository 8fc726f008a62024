"""From settings to the processes of a system: pure, so that what would run can be read and tested without it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orca.cli.up import places
from orca.cli.up.settings import KEYS_VARIABLE, UpSettings
from orca.cli.up.spec import ProcessSpec, Role
from orca.core.domain.model import ModelInfo
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed

DEPLOYMENT = "local"
"""Name of this system in its pool."""

DRAIN_S = 3
"""How long the gateway lets open streams go on after Ctrl-C; their requests stay in the pool in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """host:port of every process but Redis."""

    gateways: tuple[str, ...]  # the first is the one that people are told of
    schedulers: tuple[str, ...]  # of each group: where its stages meet
    metrics: tuple[str, ...]  # of each scheduler
    workers: tuple[tuple[str, ...], ...]  # of each group, stage 0 first
    health: tuple[tuple[str, ...], ...]  # of each worker, in the same order

    @property
    def reached(self) -> tuple[str, ...]:
        """Where people and probes of this machine find each gateway, also when it listens on all addresses."""
        return tuple(each.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]") for each in self.gateways)

    @classmethod
    def find(cls, settings: UpSettings) -> "Addresses":
        """Free ports of this machine. Raises: SettingError when a wanted public port is not free."""
        first = places.claim_port(settings.host, settings.port)
        wanted = [first + number if settings.port else 0 for number in range(1, settings.gateways)]
        others = [places.claim_port(settings.host, port) for port in wanted]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        free = iter(f"127.0.0.1:{port}" for port in places.free_ports(settings.replicas * (2 + 2 * settings.stages)))
        groups = range(settings.replicas)
        return cls(
            gateways=tuple(f"{host}:{port}" for port in (first, *others)),
            schedulers=tuple(next(free) for _ in groups),
            metrics=tuple(next(free) for _ in groups),
            workers=tuple(tuple(next(free) for _ in range(settings.stages)) for _ in groups),
            health=tuple(tuple(next(free) for _ in range(settings.stages)) for _ in groups),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the processes find around them."""

    addresses: Addresses
    redis_url: str
    redis_login: Mapping[str, str]  # variables that name the user and the file of its password
    logs: Path  # folder of the log files
    generation: int  # of the revision: higher than at any earlier start on the same pool
    gpus: tuple[str, ...] = ()  # at least `tensor` of them when stages compute on cuda


def plan(settings: UpSettings, model: ModelInfo, around: Surroundings) -> list[ProcessSpec]:
    """The gateways, and for each group a scheduler and its stages; Redis is not among them.

    Args: settings: those of `with_layout`.
    """
    specs = [_gateway(settings, model, around, number) for number in range(settings.gateways)]
    for group in range(settings.replicas):
        specs.append(_scheduler(settings, model, around, group))
        specs += [_worker(settings, model, around, group, stage) for stage in range(settings.stages)]
    return specs


def _gateway(settings: UpSettings, model: ModelInfo, around: Surroundings, number: int) -> ProcessSpec:
    address = around.addresses.gateways[number]
    host, _, port = address.rpartition(":")
    flags: dict[str, object] = {
        **_model_flags(settings, model),
        "name": model.name,
        "host": host.strip("[]"),
        "port": port,
        "pool": around.redis_url,
        "deployment": DEPLOYMENT,
        "drain_seconds": DRAIN_S,
        "slo_enforce": "true" if settings.slo_enforce else None,
        "api_keys_file": None if settings.api_keys_file is None else Path(settings.api_keys_file).resolve(),
        "open_to_network": "true" if settings.open_to_network else None,
    }
    keys = {KEYS_VARIABLE: ",".join(settings.api_keys)} if settings.api_keys else {}
    return _spec(
        Role.GATEWAY,
        f"gateway-{number}" if number else "gateway",
        flags,
        around.addresses.reached[number],
        around.logs,
        health=around.addresses.reached[number],
        environment={**around.redis_login, **keys},
        stop_seconds=DRAIN_S + 2.0,
    )


def _scheduler(settings: UpSettings, model: ModelInfo, around: Surroundings, group: int) -> ProcessSpec:
    name = _scheduler_name(group)
    flags: dict[str, object] = {
        **_model_flags(settings, model),
        "group": f"group-{group}",
        "stages": ",".join(around.addresses.workers[group]),
        "listen": around.addresses.schedulers[group],
        "metrics_listen": around.addresses.metrics[group],
        "pool": around.redis_url,
        "deployment": DEPLOYMENT,
        "generation": around.generation,
        "policy": settings.policy,
        "microbatch_size": settings.microbatch_size,
        "without_habits": ",".join(settings.without_habits) or None,
        "max_batch_size": settings.max_batch_size,
        "max_batch_tokens": settings.max_batch_tokens,
        "prefetch": settings.prefetch,
        "commit_interval_ms": settings.commit_interval_ms,
        "slots": settings.slots,
        "iteration_log": _iteration_log(settings, name),
    }
    metrics = f"http://{around.addresses.metrics[group]}/metrics"
    return _spec(
        Role.SCHEDULER,
        name,
        flags,
        metrics,
        around.logs,
        health=around.addresses.metrics[group],
        environment=around.redis_login,
        restart=("--predecessor-exited",),
    )


def _scheduler_name(group: int) -> str:
    return f"scheduler-{group}"


def _worker(settings: UpSettings, model: ModelInfo, around: Surroundings, group: int, stage: int) -> ProcessSpec:
    name = f"worker-{group}.{stage}"
    flags: dict[str, object] = {
        **_model_flags(settings, model),
        "stage": stage,
        "stages": settings.stages,
        "tensor": settings.tensor,
        "listen": around.addresses.workers[group][stage],
        "health_listen": around.addresses.health[group][stage],
        "device": settings.device,
        "threads": settings.threads,
        "slots_max": settings.slots or slots_of_use(settings, model),
        "iteration_log": _iteration_log(settings, name),
    }
    environment = {}
    if settings.device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(settings, around.gpus, group, stage))
        # NCCL refuses two ranks on one device; Gloo goes through host memory.
        flags["link"] = "auto" if _has_gpu_per_rank(settings, around.gpus) else "gloo"
    return _spec(
        Role.WORKER,
        name,
        flags,
        around.addresses.workers[group][stage],
        around.logs,
        health=around.addresses.health[group][stage],
        environment=environment,
        scheduler=_scheduler_name(group),
    )


def gpus_of(settings: UpSettings, gpus: tuple[str, ...], group: int, stage: int) -> tuple[str, ...]:
    """The devices of a stage's ranks: its own where there are enough for all ranks, else the first ones, shared."""
    first = (group * settings.stages + stage) * settings.tensor if _has_gpu_per_rank(settings, gpus) else 0
    return gpus[first : first + settings.tensor]


def _has_gpu_per_rank(settings: UpSettings, gpus: tuple[str, ...]) -> bool:
    return len(gpus) >= settings.ranks


def _iteration_log(settings: UpSettings, name: str) -> Path | None:
    return None if settings.iteration_log is None else Path(settings.iteration_log).resolve() / f"{name}.jsonl"


def slots_of_use(settings: UpSettings, model: ModelInfo) -> int:
    """KV slots beyond which a group gains nothing: a full batch of requests as long as the model allows.

    At least as many as 16 such requests take, so that a smaller batch keeps the slots that the pool was promised.
    """
    return max(settings.max_batch_size, 16) * slots_needed(model.max_model_len, DEFAULT_BLOCK_TOKENS)


def _model_flags(settings: UpSettings, model: ModelInfo) -> dict[str, object]:
    return {
        "model": model.folder.resolve(),
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "log_level": settings.log_level,
    }


def _spec(
    role: Role,
    name: str,
    flags: dict[str, object],
    address: str,
    logs: Path,
    *,
    health: str,
    environment: Mapping[str, str] | None = None,
    scheduler: str | None = None,
    restart: tuple[str, ...] = (),
    stop_seconds: float = 5.0,
) -> ProcessSpec:
    """A subcommand of `orca` with flags from names and values; those that are None are left out."""
    words = [word for flag, value in flags.items() if value is not None for word in (_flag(flag), str(value))]
    return ProcessSpec(
        role=role,
        name=name,
        command=(sys.executable, "-m", "orca.cli.main", role.name.lower(), *words),
        address=address,
        log=logs / f"{name}.log",
        health=health,
        environment=environment or {},
        scheduler=scheduler,
        restart_arguments=restart,
        stop_seconds=stop_seconds,
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
