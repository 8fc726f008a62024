"""The number of KV slots that a rank offers: the memory left by its weights, divided by the ranks that share it."""

import logging
from pathlib import Path

import torch

from orca.core.domain.encoder_decoder import SOURCE_TOKENS_MAX
from orca.worker.machine import memory_cgroups
from orca.worker.models.build import StageModel
from orca.worker.settings import WorkerSettings

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
    is_cuda = device.type == "cuda"
    free_bytes = torch.cuda.mem_get_info(device)[0] if is_cuda else memory_available_bytes()
    # The ranks load at the same time, and none sees how much memory another will use.
    sharers = 1 if is_cuda else settings.ranks_on_machine
    usable_bytes = int(free_bytes * settings.memory_share) // sharers - workspace_bytes(model)
    slots = usable_bytes // model.kv_bytes_per_slot if model.kv_bytes_per_slot else _SLOTS_WITHOUT_MEMORY
    slots = max(slots, 0)
    if settings.slots_max is not None:
        slots = min(slots, settings.slots_max)
    log.info(
        "KV slots offered",
        extra={"slots": slots, "kv_bytes": slots * model.kv_bytes_per_slot, "free_bytes": free_bytes}
        | {"memory_share": settings.memory_share, "ranks_sharing": sharers, "weight_bytes": model.weight_bytes},
    )
    return slots


def workspace_bytes(model: StageModel) -> int:
    """Return the memory for the keys and values of one encoder layer, in the step with most source tokens."""
    if model.encoder is None:
        return 0
    tokens = max(SOURCE_TOKENS_MAX, model.info.max_model_len)
    return tokens * model.encoder.kv_bytes_per_token(model.dtype)


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
