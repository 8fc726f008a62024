"""Child processes that die with their parent:  subprocess.Popen(die_with_parent(["redis-server", ...])).

The command that `die_with_parent` returns runs this file first:  python parent_death.py PARENT_PID SIGNAL COMMAND...
The kernel then sends the signal to the process when the thread that started it ends, for whatever reason
(PR_SET_PDEATHSIG). The order survives exec. It is given before the command and not between fork and exec, where Python
code may deadlock on locks that another thread of the parent held. This file imports nothing of Orca, so that it starts
in some milliseconds.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def die_with_parent(command: Sequence[str], *, ends_by: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command line of a child that runs `command` and gets the signal `ends_by` when this process ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(ends_by)), *command]


def main() -> None:
    parent, ends_by, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(ends_by), 0, 0, 0)
    # The parent may have died before the order was given.
    if os.getppid() != int(parent):
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
