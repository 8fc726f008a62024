"""The limit of open files against the bound of connections, in processes of their own."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging, resource, sys
from orca.gateway.server import allow_open_files
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
allow_open_files(connections)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "connections", "said"),
    [
        (256, 100, ["(256, 1024)"]),
        (256, 800, ["limit of open files raised for connections_max", "(1024, 1024)"]),
        (
            256,
            4096,
            [
                "limit of open files raised for connections_max",
                (
                    "the process may open 1024 files, but connections_max 4096 needs 4224: "
                    "raise the limit or lower the setting"
                ),
                "(1024, 1024)",
            ],
        ),
    ],
    ids=["enough", "raised", "too few"],
)
def test_the_soft_limit_of_open_files_is_raised_if_connections_need_it(
    soft: int, connections: int, said: list[str]
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(soft), "1024", str(connections)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.splitlines() == said
