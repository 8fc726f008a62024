"""The checker reads messages from the logs of the system: each of them is one that a part writes."""

import ast
from pathlib import Path

import pytest

from checker.faults.freezes import WAITS_FOR_SEAT
from checker.history.system_logs import CLAIMED, NEWS
from checker.rules.system import MISFIT

PRODUCT = Path(__file__).parents[3] / "services" / "orca"


@pytest.mark.parametrize("message", [*NEWS, CLAIMED, WAITS_FOR_SEAT])
def test_every_message_that_the_checker_reads_is_one_that_a_part_writes(message: str) -> None:
    sources = (path for room in ("gateway", "scheduler", "worker") for path in (PRODUCT / room).rglob("*.py"))
    assert any(f'"{message}' in path.read_text() for path in sources)


@pytest.mark.parametrize("method", ["reserve", "share", "extend", "extend_source", "_extend", "take", "keep", "evict"])
def test_each_error_of_a_ranks_cache_says_that_a_step_does_not_fit(method: str) -> None:
    module = ast.parse((PRODUCT / "worker" / "stage" / "kv_cache.py").read_text())
    bodies = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == method]
    texts = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in text.values)
        for body in bodies
        for node in ast.walk(body)
        if isinstance(node, ast.Raise)
        for text in ast.walk(node)
        if isinstance(text, ast.JoinedStr)
    ]
    assert texts
    assert all(MISFIT.search(f"EngineError: {text}") for text in texts)
