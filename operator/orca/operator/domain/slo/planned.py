"""A plan as the operator applies it: the schedule in the file of `orca plan`, and the spec with what the plan decides.

The file is checked: it came through the pool, where every part of the deployment may write.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orca.core.even_parts import even_parts
from orca.core.job_files import PLAN_FILE, SHORTFALL_FILE, SUMMARY_FILE
from orca.core.plan_report import check_line
from orca.operator.domain.resource import DeploymentSpec, RraSpec, ShapeConstraints

INT32_MAX = 2**31 - 1
POLICIES = ("iteration", "rra")
STAGES_MAX, TENSOR_MAX, THREADS_MAX = 64, 16, 1024
"""The bounds in the CRD, as those of the batches below."""
BATCH_SIZE_MAX, ENCODE_BATCH_MAX = 65536, 4194304
DEFAULT_THRESHOLD_PERCENT = 12
"""The default of the CRD and of a scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedService:
    """The part of a plan that the operator applies."""

    layers: tuple[int, ...]  # of each stage
    tensor: int
    threads: int  # of each rank
    policy: str
    max_batch_size: int
    max_batch_tokens: int  # 0: prompts run whole
    rra: RraSpec | None
    summary: str  # one line for people
    shortfall: str | None  # one line for people about a goal that is not met; None if it is

    @property
    def devices(self) -> int:
        return len(self.layers) * self.tensor

    def fits(self, constraints: ShapeConstraints, devices: int) -> bool:
        """Return whether the plan keeps to what the spec gives, on so many devices."""
        return (
            self.devices <= devices
            and constraints.stages in (None, len(self.layers))
            and constraints.tensor in (None, self.tensor)
            and constraints.stage_layers in (None, self.layers)
            and constraints.policy in (None, self.policy)
            and (constraints.max_batch_size is None or self.max_batch_size <= constraints.max_batch_size)
        )

    def applied_to(self, spec: DeploymentSpec) -> DeploymentSpec:
        """Return the spec with what the plan decides. Stages that divide the layers so by themselves are not told."""
        own = spec.parallelism.stage_layers
        is_even = self.layers == even_parts(sum(self.layers), len(self.layers))
        layers = own if is_even and not own else self.layers
        return replace(
            spec,
            parallelism=replace(spec.parallelism, stages=len(self.layers), tensor=self.tensor, stage_layers=layers),
            worker=replace(spec.worker, threads=self.threads),
            scheduler=replace(
                spec.scheduler,
                policy=self.policy,
                rra=self.rra,
                max_batch_size=self.max_batch_size,
                max_batch_tokens=self.max_batch_tokens,
            ),
        )


def read_planned(files: Mapping[str, str]) -> PlannedService:
    """Read the files of a plan (core.job_files). Raises: ValueError that names what is wrong."""
    plan = json.loads(files.get(PLAN_FILE, ""))
    schedule, device = _object(plan, "schedule"), _object(plan, "device")
    bounds, key = _object(schedule, "bounds"), _object(device, "key")
    layers = schedule.get("layers")
    if not isinstance(layers, list) or not 1 <= len(layers) <= STAGES_MAX:
        raise ValueError(f"layers must be those of 1 to {STAGES_MAX} stages")
    policy = schedule.get("policy")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}")
    planned = PlannedService(
        layers=tuple(_number({"layers": each}, "layers", most=65536) for each in layers),
        tensor=_number(schedule, "ranks", most=TENSOR_MAX),
        threads=_number(key, "threads", most=THREADS_MAX),
        policy=policy,
        max_batch_size=_number(bounds, "max_batch_size", most=BATCH_SIZE_MAX),
        max_batch_tokens=_optional(bounds, "max_batch_tokens") or 0,
        rra=_read_rra(bounds) if policy == "rra" else None,
        summary=_text(files, SUMMARY_FILE),
        shortfall=_text(files, SHORTFALL_FILE) if SHORTFALL_FILE in files else None,
    )
    _check(planned)
    return planned


def _read_rra(bounds: Mapping[str, Any]) -> RraSpec:
    threshold = bounds.get("threshold_percent")
    return RraSpec(
        encode_batch=_number(bounds, "encode_batch", most=ENCODE_BATCH_MAX),
        decode_steps=_number(bounds, "decode_steps"),
        decode_batch=_optional(bounds, "decode_batch", most=ENCODE_BATCH_MAX),
        encode_tokens=_optional(bounds, "encode_tokens"),
        threshold_percent=DEFAULT_THRESHOLD_PERCENT
        if threshold is None
        else _number(bounds, "threshold_percent", least=0, most=100),
    )


def _check(planned: PlannedService) -> None:
    """Check what rules of the CRD check in a spec. Raises: ValueError."""
    if planned.rra is not None:
        room = len(planned.layers) * planned.max_batch_size
        if max(planned.rra.encode_batch, planned.rra.decode_batch or 0) > room:
            raise ValueError(f"encode_batch and decode_batch must be at most {room}, the requests of all micro-batches")
        if planned.max_batch_tokens:
            raise ValueError("max_batch_tokens needs the policy iteration")
    elif 0 < planned.max_batch_tokens <= planned.max_batch_size:
        raise ValueError("max_batch_tokens must be above max_batch_size")


def _object(values: Any, name: str) -> Mapping[str, Any]:
    found = values.get(name) if isinstance(values, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{name} must be an object")
    return found


def _number(values: Mapping[str, Any], name: str, *, least: int = 1, most: int = INT32_MAX) -> int:
    found = values.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}")
    return found


def _optional(values: Mapping[str, Any], name: str, *, most: int = INT32_MAX) -> int | None:
    return None if values.get(name) is None else _number(values, name, most=most)


def _text(files: Mapping[str, str], name: str) -> str:
    found = files.get(name, "").strip()
    check_line(name, found)
    return found
