"""A stopped process is noticed and started again."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from orca.cli.up.probe import Probe
from orca.cli.up.spec import ProcessSpec, Role
from orca.cli.up.supervisor import Child, Supervisor
from support.cli.probed_parts import Counted, until

SERVES = """
import asyncio
from orca.core.process.internal_port import InternalPort

async def main():
    port = await InternalPort.open("127.0.0.1:{port}")
    await asyncio.sleep(600)

asyncio.run(main())
"""


class CountedChild(Counted, Child):
    pass


async def test_a_stopped_process_is_killed_and_started_again(tmp_path: Path, unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    spec = ProcessSpec(
        role=Role.WORKER,
        name="worker",
        command=(sys.executable, "-c", SERVES.format(port=unused_tcp_port)),
        address=address,
        log=tmp_path / "log",
        health=address,
    )
    child, told = CountedChild(spec), []
    supervisor = Supervisor([child], report=told.append, restart_delays_s=(0.0,) * 9)
    # A long one: on a busy machine, who lives must not be taken for frozen.
    probe = Probe([child], period_s=1.0, report=told.append)
    running, probing = asyncio.create_task(supervisor.run()), asyncio.create_task(probe.run())
    await until(lambda: child.answers)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    await until(lambda: told)
    heard = child.answers
    await until(lambda: child.answers > heard)
    assert told[0] == f"worker (pid {first}) is frozen: it did not answer for 3 s; it is killed and started again"
    assert child.pid not in (None, first)
    probing.cancel()
    await supervisor.stop()
    await running
