"""Keys of profiles and plans: digests of everything in a spec that decides them.

Equal keys ask the same question. What the pool knows is no part of a key, since its answer may be missing: counted
lengths, and the promise to a request.
"""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from orca.operator.domain.model_references import outputs_digest, source_digest
from orca.operator.domain.resource import ModelSpec, OrcaDeployment, SloSpec
from orca.operator.domain.slo.resources import profiled_devices


def profile_key(deployment: OrcaDeployment, image: str) -> str:
    """Name the profile of a deployment: 10 hex digits.

    Args: deployment: as its author wrote it. image: of the stages.
    """
    spec, worker = deployment.spec, deployment.spec.worker
    measured = {
        "model": outputs_digest(spec.model, image),
        "quantization": spec.model.quantization,
        "image": image,
        "devices": profiled_devices(deployment),
        "tensor": deployment.constraints.tensor,
        "device": [worker.device, worker.accelerator_resource, worker.threads],
        "resources": [dict(worker.resources.requests), dict(worker.resources.limits)],
        "node": [dict(worker.node_selector), list(worker.tolerations), worker.runtime_class_name],
        "pod": [dict(worker.pod_patch), list(worker.pod_patch_remove), worker.shared_memory_mib],
    }
    return _digest(measured)


def plan_key(deployment: OrcaDeployment, image: str) -> str:
    """Name the plan of a deployment: 10 hex digits. Args: as of profile_key."""
    spec = deployment.spec
    decided = {
        "profile": profile_key(deployment, image),
        "goal": _goal(_slo(deployment)),
        "constraints": asdict(deployment.constraints),
        "room": [spec.scheduler.kv_slots, spec.worker.memory_share_percent, spec.model.max_model_len],
        "prefetch": spec.scheduler.prefetch,
    }
    return _digest(decided)


def layers_digest(model: ModelSpec) -> str:
    """Name what decides whether a plan of one release runs with the next one: model, dtype and quantization.

    Unlike outputs_digest it does not follow the image: an upgrade keeps its plan until there is another one.
    """
    return _digest([source_digest(model), model.dtype, model.quantization])


def _goal(slo: SloSpec) -> dict[str, Any]:
    """Return the goal, without what becomes of a better plan: that changes no plan."""
    return {name: value for name, value in asdict(slo).items() if name != "replan"}


def _slo(deployment: OrcaDeployment) -> SloSpec:
    assert deployment.spec.slo is not None
    return deployment.spec.slo


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]
