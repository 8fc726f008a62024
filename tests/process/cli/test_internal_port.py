"""A part whose loop is blocked, as its internal port shows it."""

import asyncio
import subprocess
import sys

from orca.cli.up.health_checks import http_status

ANSWERS_WITHIN_S = 60.0  # a shared machine; alone it takes a millisecond

BLOCKS_AFTER_ITS_FIRST_ANSWER = """
import asyncio, time
from orca.core.process.internal_port import InternalPort

async def main():
    port = await InternalPort.open("127.0.0.1:0")
    print(port.address, flush=True)
    await asyncio.to_thread(input)
    print("blocks", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


def test_a_blocked_event_loop_accepts_connections_and_answers_none() -> None:
    command = [sys.executable, "-c", BLOCKS_AFTER_ITS_FIRST_ANSWER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as part:
        assert part.stdin is not None
        assert part.stdout is not None
        address = part.stdout.readline().strip()
        assert asyncio.run(http_status(address, "/health", ANSWERS_WITHIN_S)) == 200
        part.stdin.write("\n")
        part.stdin.flush()
        assert part.stdout.readline() == "blocks\n"
        assert asyncio.run(http_status(address, "/health", 0.5)) is None
        part.kill()
