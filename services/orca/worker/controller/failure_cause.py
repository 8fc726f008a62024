"""Why a rank failed, as far as its controller can tell: what the pool's rule about poison asks (orca.pool.poison).

INSIDE blames what the rank ran, so it is said only of what a rank did by itself: it raised, it ended with a status or
by a fault's signal, it hung, or the kernel killed it because memory ran out. SIGKILL and SIGTERM come from outside
where no such kill was counted: pods are deleted that way. A rank that broke off while it waited for another one says
LINK: whoever it waited for knows more.

Not seen: where the kernel kills a container as a whole when memory runs out, the controller goes with its ranks, and
to the master the stage has vanished, which counts as from outside.
"""

import enum
import signal
from pathlib import Path

from orca.worker.machine import memory_cgroups

_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


class Cause(enum.Enum):
    INSIDE = "inside"
    OUTSIDE = "outside"
    LINK = "link"


def cause_of_death(status: int, *, was_out_of_memory: bool) -> Cause:
    """Args: status of the process, negative for a signal, and whether memory ran out while it lived."""
    return Cause.OUTSIDE if status in _FROM_OUTSIDE and not was_out_of_memory else Cause.INSIDE


def outweighs(later: Cause, earlier: Cause | None) -> bool:
    """Does what is heard later explain the failure better?

    A death from outside explains everything after it: a rank may even abort because its peer is gone (NCCL does).
    """
    return earlier in (None, Cause.LINK) or later is Cause.OUTSIDE


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Processes of this container that the kernel has killed because memory ran out; 0 where nobody counts them.

    Source: `oom_kill` of memory.events (cgroup v2) or memory.oom_control (v1), of the innermost group that is mounted.
    """
    for group in memory_cgroups(root):
        for file in ("memory.events", "memory.oom_control"):
            try:
                lines = (group / file).read_text().splitlines()
            except OSError:
                continue
            counts = dict(line.split(maxsplit=1) for line in lines)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0
