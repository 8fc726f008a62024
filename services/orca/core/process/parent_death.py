"""Child processes that die with their parent:  subprocess.Popen(die_with_parent(["redis-server", ...])).

The command that `die_with_parent` gives runs this file first:  python parent_death.py PARENT_PID SIGNAL COMMAND...  The kernel
then sends the signal to the process when the thread that started it ends, whatever ended it (PR_SET_PDEATHSIG), and
keeps that order through exec. It is done before the command and not between fork and exec, where Python code may
deadlock on locks that another thread of the parent held. Run as a file it imports nothing of Orca: it starts in some
milliseconds.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def die_with_parent(command: Sequence[str], *, ends_by: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command line that runs `command` as a child of this process and ends it by `ends_by` when this one ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(ends_by)), *command]


def main() -> None:
    parent, ends_by, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(ends_by), 0, 0, 0)
    # It may have died before the order was given.
    if os.getppid() != int(parent):
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
