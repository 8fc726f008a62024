"""A process whose log nobody reads."""

import subprocess
import sys

FULL_PIPE_AND_QUEUE = 4 << 20
"""More bytes than a pipe and the handler's queue hold."""

LOGS_INTO_A_FULL_PIPE = f"""
import logging
from orca.core.process.logs import configure_logging
configure_logging("gateway")
for _ in range({FULL_PIPE_AND_QUEUE} // 1000):
    logging.getLogger("orca").info("x" * 1000)
print("went on", flush=True)
"""


def test_a_process_runs_and_exits_while_nobody_reads_its_log() -> None:
    command = [sys.executable, "-c", LOGS_INTO_A_FULL_PIPE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "went on\n"
        # Not before its end is anything read from its standard error.
        assert process.wait(30) == 0
