"""Free ports among several processes."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from checker.systems import ports as checker_ports
from orca.core.process import ports


@pytest.mark.parametrize("free_port", [ports.free_port, checker_ports.free_port])
def test_a_free_port_is_reserved_across_processes(free_port: Callable[[], int]) -> None:
    port = free_port()
    look = f"import socket; socket.socket().bind(('127.0.0.1', {port}))"
    other = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert "Address already in use" in other.stderr
