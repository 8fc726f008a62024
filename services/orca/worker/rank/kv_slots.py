"""How many KV slots a rank offers: the memory beside its weights, divided among those known to share it."""

import logging
from pathlib import Path

import torch

from orca.worker.machine import memory_cgroups
from orca.worker.models.build import StageModel
from orca.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# What a memory cgroup may take and takes, in bytes, and the line of memory.stat that says how much of that is the cache
# of files, such as the weights, which the kernel gives back before anybody goes without: version 2, version 1.
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def slots_possible(settings: WorkerSettings, model: StageModel, device: torch.device) -> int:
    """KV slots that fit on this rank's device beside what is loaded, at most `slots_max`."""
    is_cuda = device.type == "cuda"
    room = torch.cuda.mem_get_info(device)[0] if is_cuda else memory_available_bytes()
    # The ranks load at the same time, and none sees what another will take.
    sharers = 1 if is_cuda else settings.ranks_on_machine
    slots = int(room * settings.memory_share) // sharers // model.kv_bytes_per_slot
    if settings.slots_max is not None:
        slots = min(slots, settings.slots_max)
    log.info(
        "KV slots offered",
        extra={"slots": slots, "kv_bytes": slots * model.kv_bytes_per_slot, "free_bytes": room}
        | {"memory_share": settings.memory_share, "ranks_sharing": sharers, "weight_bytes": model.weight_bytes},
    )
    return slots


def memory_available_bytes(root: Path = Path("/")) -> int:
    """Of the machine, or of a group around this process where that is less: a container, a service of systemd."""
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
    """A line of memory.stat, in bytes; 0 where there is none."""
    if not stat.exists():
        return 0
    return int(dict(line.split() for line in stat.read_text().splitlines()).get(name, 0))
