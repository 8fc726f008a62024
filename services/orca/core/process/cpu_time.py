"""CPU time of a process, as the kernel counts it."""

import os

from orca.core.process.process_tree import stat_fields


def cpu_time_s(pid: int | None) -> float:
    """Return the CPU seconds of all threads of a process, to a hundredth; 0 if there is no such process.

    Source: proc(5), /proc/PID/stat, utime and stime.
    """
    fields = stat_fields(pid)
    if not fields:
        return 0.0
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")
