"""How many KV slots a rank offers: the memory beside its weights, divided among those known to share it."""

import logging
from pathlib import Path

import torch

from orca.worker.models.build import StageModel
from orca.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


def slots_possible(settings: WorkerSettings, model: StageModel, device: torch.device) -> int:
    """KV slots that fit on this rank's device beside what is loaded, at most `slots_max`."""
    is_cuda = device.type == "cuda"
    room = torch.cuda.mem_get_info(device)[0] if is_cuda else _memory_available_bytes()
    # The ranks load at the same time, and none sees what another will take.
    sharers = 1 if is_cuda else settings.ranks_on_machine
    slots = int(room * settings.memory_share) // sharers // model.kv_bytes_per_slot
    if settings.slots_max is not None:
        slots = min(slots, settings.slots_max)
    log.info(
        "KV slots offered",
        extra={"slots": slots, "kv_bytes": slots * model.kv_bytes_per_slot, "free_bytes": room}
        | {"memory_share": settings.memory_share, "ranks_sharing": sharers},
    )
    return slots


def _memory_available_bytes() -> int:
    """Of the machine, or of the container where that is less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue  # no such cgroup version here, or "max": no limit
    return max(available, 0)
