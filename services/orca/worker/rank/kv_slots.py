"""The number of KV slots that a rank offers: the memory left by its weights, divided by the ranks that share it."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from orca.worker.machine import memory_cgroups
from orca.worker.models.build import StageModel
from orca.worker.models.model_shape import EncoderDecoderShape
from orca.worker.settings import WorkerSettings
from orca.worker.stage.encoder_steps import workspace_slots

log = logging.getLogger(__name__)

# For cgroup versions 2 and 1: the files with a memory cgroup's limit and use in bytes, and the line of memory.stat with
# the part of the use that is page cache. The kernel frees page cache, such as that of the weight files, before memory
# runs out.
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


_SLOTS_WITHOUT_MEMORY = 1 << 40
"""Slots that a stage with only encoder layers offers: it keeps nothing of a token, so others decide their number."""


def slots_possible(settings: WorkerSettings, model: StageModel, device: torch.device) -> int:
    """Return how many KV slots fit into the free memory of this rank's device, at most `slots_max`."""
    is_cuda, per_slot = device.type == "cuda", model.kv_bytes_per_slot
    free_bytes = torch.cuda.mem_get_info(device)[0] if is_cuda else memory_available_bytes()
    # The ranks load at the same time, and none sees how much memory another will use.
    stages = [model.shard.stage]
    if not is_cuda and settings.is_alone_on_machine:
        stages = list(range(settings.stages))
    ranks = 1 if is_cuda else settings.tensor
    sharers = ranks * max(1, sum(_has_slots(model, stage) for stage in stages))
    sources = ranks * sum(source_bytes(model, stage) for stage in stages)
    usable_bytes = (int(free_bytes * settings.memory_share) - sources) // sharers
    slots = usable_bytes // per_slot if per_slot else _SLOTS_WITHOUT_MEMORY
    if usable_bytes < 0:
        slots = 0
    if settings.slots_max is not None:
        slots = min(slots, settings.slots_max)
    log.info(
        "KV slots offered",
        extra={"slots": slots, "kv_bytes": slots * per_slot, "free_bytes": free_bytes, "source_bytes": sources}
        | {"memory_share": settings.memory_share, "ranks_sharing": sharers, "weight_bytes": model.weight_bytes},
    )
    return slots


def source_bytes(model: StageModel, stage: int) -> int:
    """Return the memory for the sources of a step on a rank of some stage; 0 for a decoder-only model.

    Sources are not cut into chunks as prompts are. At a time there are two rows of the hidden size: the encoder output
    and a layer's own. There are the outputs of one part of a layer: its products, and attention or the activated MLP.
    In an encoder there are also its keys and values (encoder_steps.py).
    """
    config, layers = model.config, _layers(model, stage)
    if not isinstance(config, EncoderDecoderShape):
        return 0
    encoder, tensor = config.encoder, model.shard.tensor
    width = 2 * -(-config.num_heads // tensor) * config.head_dim  # keys and values of cross attention
    if layers.start < encoder.layers:
        inner = -(-encoder.heads // tensor) * encoder.head_dim
        width = 2 * inner + max(4 * inner, 3 * -(-encoder.intermediate_size // tensor))
    return workspace_slots(model) * model.dtype.itemsize * (2 * config.hidden_size + width)


def _has_slots(model: StageModel, stage: int) -> bool:
    """Return whether ranks of a stage keep anything of a token."""
    return _layers(model, stage).stop > model.encoder_layers


def _layers(model: StageModel, stage: int) -> range:
    return replace(model.shard, stage=stage).layers(model.config.num_layers)


def memory_available_bytes(root: Path = Path("/")) -> int:
    """Return the available memory of the machine, or of a cgroup around this process if that is less."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    for group in memory_cgroups(root):
        for limit, used, cached in _LIMITS:
            try:
                taken = int((group / used).read_text()) - _counted(group / "memory.stat", cached)
                available = min(available, int((group / limit).read_text()) - taken)
            except (OSError, ValueError):
                continue  # no such cgroup version here, or "max": no limit
    return max(available, 0)


def _counted(stat: Path, name: str) -> int:
    """Return a line of memory.stat, in bytes; 0 if there is none."""
    if not stat.exists():
        return 0
    return int(dict(line.split() for line in stat.read_text().splitlines()).get(name, 0))
