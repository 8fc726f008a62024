"""A system under the checker that does not come up."""

from pathlib import Path

import pytest

from checker.systems.system import System, SystemFailure


async def test_a_system_that_does_not_start_is_reported_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(SystemFailure, match="no-such-model"):
        async with System(tmp_path / "run", ("--model", str(tmp_path / "no-such-model"))):
            raise AssertionError("it cannot be up")
