"""CPU time of a process, as the kernel counts it."""

import os
from pathlib import Path


def cpu_time_s(pid: int | None) -> float:
    """Return the CPU seconds of all threads of a process, to a hundredth; 0 if there is no such process.

    Source: proc(5), /proc/PID/stat, utime and stime.
    """
    try:
        # The second field is the command's name in brackets, which may hold spaces and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")
