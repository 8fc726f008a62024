"""Run a command that draws progress on the terminal, less its list of packages: without_list.py uv pip install ...

uv prints a line for each package that it installed, and only --quiet, which takes the bars along, leaves them out. Its
standard error is a terminal here too, so that it draws.
"""

import os
import pty
import re
import subprocess
import sys
import termios

PACKAGE = re.compile(rb"^ (?:\x1b\[[\d;]*m)*[-+~](?:\x1b\[[\d;]*m)* .*\n", re.MULTILINE)


def main() -> int:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, termios.tcgetwinsize(sys.stderr.fileno()))
    with subprocess.Popen(sys.argv[1:], stderr=theirs) as command:
        os.close(theirs)
        held = b""
        while read := _read(ours):
            held += read
            # A line that begins as those of the list do is held until it is whole; bars come at once.
            whole = held.rfind(b"\n") + 1
            ready = len(held) if held[whole : whole + 1] != b" " else whole
            _show(held[:ready])
            held = held[ready:]
        _show(held)
    return command.returncode


def _show(text: bytes) -> None:
    sys.stderr.buffer.write(PACKAGE.sub(b"", text))
    sys.stderr.buffer.flush()


def _read(terminal: int) -> bytes:
    """Empty at the end, which Linux reports as an error."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


if __name__ == "__main__":
    sys.exit(main())
