"""Turns settings into the processes of a system. Pure: tests can check what would run without running it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orca.cli.up import local_resources
from orca.cli.up.settings import KEYS_VARIABLE, VARIABLES, UpSettings
from orca.cli.up.spec import ProcessSpec, Role
from orca.core.domain.model import ModelInfo
from orca.core.domain.request import DEFAULT_BLOCK_TOKENS, slots_needed, slots_of_any_split
from orca.gateway.settings import PREFIX as GATEWAY_PREFIX
from orca.scheduler.settings import CYCLE_SETTINGS, ORDER_SETTINGS
from orca.scheduler.settings import PREFIX as SCHEDULER_PREFIX
from orca.worker.settings import PREFIX as WORKER_PREFIX

DEPLOYMENT = "local"
"""Name of this system in its pool."""

DRAIN_S = 3
"""Seconds for which the gateway lets open streams go on after Ctrl-C. Their requests stay in the pool in any case."""

_PREFIXES = {Role.GATEWAY: GATEWAY_PREFIX, Role.SCHEDULER: SCHEDULER_PREFIX, Role.WORKER: WORKER_PREFIX}


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """host:port of every process except Redis."""

    gateways: tuple[str, ...]  # the first one is the public address
    schedulers: tuple[str, ...]  # rendezvous of each group's stages
    metrics: tuple[str, ...]  # metrics port of each scheduler
    workers: tuple[tuple[str, ...], ...]  # per group, stage 0 first
    health: tuple[tuple[str, ...], ...]  # health port of each worker, in the same order

    @property
    def reached(self) -> tuple[str, ...]:
        """Addresses at which this machine reaches each gateway, also when the gateway listens on all addresses."""
        return tuple(address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]") for address in self.gateways)

    @classmethod
    def find(cls, settings: UpSettings) -> "Addresses":
        """Pick free ports of this machine. Raises: SettingError when a wanted public port is not free."""
        first = local_resources.pick_port(settings.host, settings.port)
        wanted = [first + number if settings.port else 0 for number in range(1, settings.gateways)]
        others = [local_resources.pick_port(settings.host, port) for port in wanted]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        free = iter(
            f"127.0.0.1:{port}" for port in local_resources.free_ports(settings.replicas * (2 + 2 * settings.stages))
        )
        groups = range(settings.replicas)
        return cls(
            gateways=tuple(f"{host}:{port}" for port in (first, *others)),
            schedulers=tuple(next(free) for _ in groups),
            metrics=tuple(next(free) for _ in groups),
            workers=tuple(tuple(next(free) for _ in range(settings.stages)) for _ in groups),
            health=tuple(tuple(next(free) for _ in range(settings.stages)) for _ in groups),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeContext:
    """Facts of this start that the settings do not hold: addresses, Redis, folders and devices."""

    addresses: Addresses
    redis_url: str
    redis_login: Mapping[str, str]  # variables with the user and the path of the password file
    logs: Path  # folder of the log files
    generation: int  # generation of the revision: higher than at any earlier start on the same pool
    gpus: tuple[str, ...] = ()  # at least `tensor` devices when stages compute on cuda
    bounds_folder: Path | None = None  # has the files of bounds; None: bounds do not change


def plan(settings: UpSettings, model: ModelInfo, context: RuntimeContext) -> list[ProcessSpec]:
    """Return the processes: the gateways, then for each group its scheduler and stages. Redis is not included.

    Args: settings: the result of `with_layout`.
    """
    specs = [_gateway(settings, model, context, number) for number in range(settings.gateways)]
    for group in range(settings.replicas):
        specs.append(_scheduler(settings, model, context, group))
        specs += [_worker(settings, model, context, group, stage) for stage in range(settings.stages)]
    return specs


def ignored_variables(settings: UpSettings, specs: Sequence[ProcessSpec], environment: Mapping[str, str]) -> list[str]:
    """Return the variables of parts that have no effect, since each part of the kind gets another value as an option.

    Args: environment: of all parts.
    Returns: names, each with the option of `orca up` to use, if it is the same there.
    """
    found: list[str] = []
    for role, prefix in _PREFIXES.items():
        flags = [dict(zip(each.command[4::2], each.command[5::2], strict=True)) for each in specs if each.role is role]
        for variable in sorted(environment.keys() - set(VARIABLES)):
            name = variable.removeprefix(prefix).lower()
            decided = {each[_flag(name)] for each in flags if variable.startswith(prefix) and _flag(name) in each}
            if decided and environment[variable] not in decided:
                is_same = _text(getattr(settings, name, None)) in decided
                found.append(f"{variable} (use {_flag(name)})" if is_same else variable)
    return found


def _gateway(settings: UpSettings, model: ModelInfo, context: RuntimeContext, number: int) -> ProcessSpec:
    address = context.addresses.gateways[number]
    host, _, port = address.rpartition(":")
    flags: dict[str, object] = {
        **_model_flags(settings, model),
        "name": model.name,
        "max_model_len": settings.max_model_len,
        "tool_format": settings.tool_format,
        "reasoning_format": settings.reasoning_format,
        "host": host.strip("[]"),
        "port": port,
        "pool": context.redis_url,
        "deployment": DEPLOYMENT,
        "drain_seconds": DRAIN_S,
        "cors_origins": ",".join(settings.cors_origins) or None,
        "metric_names": settings.metric_names,
        "slo_enforce": settings.slo_enforce,
        "api_keys_file": None if settings.api_keys_file is None else Path(settings.api_keys_file).resolve(),
        "open_to_network": settings.open_to_network,
        "prefix_sharing": settings.prefix_sharing,
    }
    keys = {KEYS_VARIABLE: ",".join(settings.api_keys)} if settings.api_keys else {}
    return _spec(
        Role.GATEWAY,
        f"gateway-{number}" if number else "gateway",
        flags,
        context.addresses.reached[number],
        context.logs,
        health=context.addresses.reached[number],
        environment={**context.redis_login, **keys},
        stop_seconds=DRAIN_S + 2.0,
    )


def _scheduler(settings: UpSettings, model: ModelInfo, context: RuntimeContext, group: int) -> ProcessSpec:
    name = _scheduler_name(group)
    flags: dict[str, object] = {
        **_model_flags(settings, model),
        "name": model.name,
        "group": f"group-{group}",
        "stages": ",".join(context.addresses.workers[group]),
        "listen": context.addresses.schedulers[group],
        "metrics_listen": context.addresses.metrics[group],
        "metric_names": settings.metric_names,
        "pool": context.redis_url,
        "deployment": DEPLOYMENT,
        "generation": context.generation,
        "policy": settings.policy,
        "microbatch_size": settings.microbatch_size,
        "without_habits": ",".join(settings.without_habits) or None,
        **{name: getattr(settings, name) for name in CYCLE_SETTINGS},
        "max_batch_size": settings.max_batch_size,
        "max_batch_tokens": settings.max_batch_tokens,
        "bounds_file": _bounds_file(context, settings.policy),
        **{name: getattr(settings, name) for name in ("order", *ORDER_SETTINGS)},
        "prefix_cache": settings.prefix_cache,
        "prefix_charge": settings.prefix_charge,
        "prefetch": settings.prefetch,
        "commit_interval_ms": settings.commit_interval_ms,
        "slots": settings.slots,
        "iteration_log": _iteration_log(settings, name),
    }
    metrics = f"http://{context.addresses.metrics[group]}/metrics"
    return _spec(
        Role.SCHEDULER,
        name,
        flags,
        metrics,
        context.logs,
        health=context.addresses.metrics[group],
        environment=context.redis_login,
        restart=("--predecessor-exited",),
    )


def _bounds_file(context: RuntimeContext, policy: str) -> Path | None:
    return None if context.bounds_folder is None else bounds_file(context.bounds_folder, policy)


def bounds_file(folder: Path, policy: str) -> Path:
    """Return the file of bounds. Each policy has its own, because their bounds have other names."""
    return folder / f"bounds-{policy}.json"


def _scheduler_name(group: int) -> str:
    return f"scheduler-{group}"


def _worker(settings: UpSettings, model: ModelInfo, context: RuntimeContext, group: int, stage: int) -> ProcessSpec:
    name = f"worker-{group}.{stage}"
    flags: dict[str, object] = {
        **_model_flags(settings, model),
        "stage": stage,
        "stages": settings.stages,
        "layers": settings.layers,
        "tensor": settings.tensor,
        "listen": context.addresses.workers[group][stage],
        "health_listen": context.addresses.health[group][stage],
        "device": settings.device,
        "threads": settings.threads,
        "max_model_len": settings.max_model_len,
        "slots_max": settings.slots or useful_slots(settings, model),
        "iteration_log": _iteration_log(settings, name),
    }
    environment = {}
    if settings.device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(stage_gpus(settings, context.gpus, group, stage))
        # NCCL refuses two ranks on one device; Gloo goes through host memory.
        flags["link"] = "auto" if _has_gpu_per_rank(settings, context.gpus) else "gloo"
    return _spec(
        Role.WORKER,
        name,
        flags,
        context.addresses.workers[group][stage],
        context.logs,
        health=context.addresses.health[group][stage],
        environment=environment,
        scheduler=_scheduler_name(group),
    )


def stage_gpus(settings: UpSettings, gpus: tuple[str, ...], group: int, stage: int) -> tuple[str, ...]:
    """Return the devices of a stage's ranks.

    Each rank has a device of its own if there are enough for all ranks; otherwise stages share the first ones.
    """
    first = (group * settings.stages + stage) * settings.tensor if _has_gpu_per_rank(settings, gpus) else 0
    return gpus[first : first + settings.tensor]


def _has_gpu_per_rank(settings: UpSettings, gpus: tuple[str, ...]) -> bool:
    return len(gpus) >= settings.ranks


def _iteration_log(settings: UpSettings, name: str) -> Path | None:
    return None if settings.iteration_log is None else Path(settings.iteration_log).resolve() / f"{name}.jsonl"


def useful_slots(settings: UpSettings, model: ModelInfo) -> int:
    """Return the largest useful number of KV slots: those of a full batch of requests of the model's maximum length.

    The result holds at least 16 such requests, so that a smaller batch keeps the slots that the pool was promised.
    """
    has_source = model.encoder_decoder is not None
    slots_of = slots_of_any_split if has_source else slots_needed
    return max(settings.max_batch_size, 16) * slots_of(model.max_model_len, DEFAULT_BLOCK_TOKENS)


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
    """Return the spec of an `orca` subcommand.

    Flags with the value None are left out. All others are there, also defaults, so that they win over variables.
    """
    words = [word for flag, value in flags.items() if value is not None for word in (_flag(flag), _text(value))]
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


def _text(value: object) -> str:
    """Return a value as a flag has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
