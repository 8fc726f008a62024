"""The cause of a rank's failure, as far as its controller can see. The pool's rule about poisoned requests uses it
(orca.pool.poison).

INSIDE blames the work of the rank, so it is reported only for a rank that failed by itself. Such a rank raised an
error, ended with a status or by the signal of a fault, or hung. Or the kernel killed it because memory ran out. SIGKILL
and SIGTERM come from OUTSIDE unless the kernel has counted such a kill: pods are deleted with these signals. A rank
that failed while it waited for another rank reports LINK: the other rank's controller knows more.

One case is not seen. If the kernel kills a container as a whole when memory runs out, the controller ends with its
ranks. To the master the stage has vanished, which counts as from outside.
"""

import enum
import signal
from pathlib import Path

from orca.worker.machine import memory_cgroups

_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


class FailureCause(enum.Enum):
    INSIDE = "inside"
    OUTSIDE = "outside"
    LINK = "link"


def cause_of_death(status: int, *, was_out_of_memory: bool) -> FailureCause:
    """Return the cause of a process's death.

    Args:
        status: of the process, negative for a signal.
        was_out_of_memory: whether memory ran out while the process lived.
    """
    is_from_outside = status in _FROM_OUTSIDE and not was_out_of_memory
    return FailureCause.OUTSIDE if is_from_outside else FailureCause.INSIDE


def outweighs(later: FailureCause, earlier: FailureCause | None) -> bool:
    """Return whether the later report explains a failure better than the earlier one.

    A death from outside explains everything after it: a rank may even abort because its peer is gone (NCCL does).
    """
    return earlier in (None, FailureCause.LINK) or later is FailureCause.OUTSIDE


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this container the kernel has killed because memory ran out; 0 without a count.

    Source: `oom_kill` of memory.events (cgroup v2) or memory.oom_control (v1), of the innermost cgroup that is mounted.
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
