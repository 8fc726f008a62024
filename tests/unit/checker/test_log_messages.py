"""The checker reads messages from the logs of the system: each of them is one that a part writes."""

from pathlib import Path

import pytest

from checker.faults.freezes import WAITS_FOR_SEAT
from checker.history.system_logs import CLAIMED, NEWS

PRODUCT = Path(__file__).parents[3] / "services" / "orca"


@pytest.mark.parametrize("message", [*NEWS, CLAIMED, WAITS_FOR_SEAT])
def test_every_message_that_the_checker_reads_is_one_that_a_part_writes(message: str) -> None:
    sources = (path for room in ("gateway", "scheduler", "worker") for path in (PRODUCT / room).rglob("*.py"))
    assert any(f'"{message}' in path.read_text() for path in sources)
