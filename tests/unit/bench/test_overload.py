"""`orca bench overload`: how its clients try again, and what it says when there is nothing to measure.

A run against a real gateway is in tests/process/gateway/test_overload_run.py.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from orca.bench.main import main as bench
from orca.bench.overload import OverloadFigures, OverloadSettings, lines, measure, peak_memory_mib
from orca.core.process.ports import free_port
from orca.planner.workload.lengths import Range
from orca.planner.workload.trace import TraceSpec, generate
from support.bench.fake_completions import HEAD, chunk, event, serving, token, usage

TRACE = generate(TraceSpec(requests=3, prompt_tokens=Range(2, 2), new_tokens=Range(1, 1), rate=None, seed=0))
REFUSAL = b"HTTP/1.1 %d No\r\ncontent-type: application/json\r\n%b\r\n{}"


def answering(refused: Callable[[int], bytes | None]) -> Callable[..., Awaitable[None]]:
    """A server that serves, but where `refused` of the call's number has another answer."""
    calls = iter(range(10**9))

    async def answer(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        refusal = refused(next(calls))
        served = HEAD + b"".join(map(chunk, (token(0), usage(1), event(b"[DONE]"))))
        await asyncio.sleep(0.02)
        writer.write(served if refusal is None else refusal)

    return answer


async def figures_of(refused: Callable[[int], bytes | None], **changes: float) -> OverloadFigures:
    asked = {"seconds": 1.2, "factor": 1, "clients": 1, "retries": 2, "seed": 0, **changes}
    async with serving(answering(refused)) as target:
        return await measure(target, TRACE, OverloadSettings(**asked))  # type: ignore[arg-type]


async def test_a_refused_call_is_retried_after_its_retry_after() -> None:
    refusal = REFUSAL % (429, b"retry-after: 60\r\nretry-after-ms: 10\r\n")
    figures = await figures_of(lambda number: refusal if number % 2 else None)
    assert figures.statuses["429"] > 3
    assert figures.goodput_per_s > 0
    assert "goodput" in "\n".join(lines(figures))


async def test_a_call_is_tried_at_most_the_given_number_of_times() -> None:
    refusal = REFUSAL % (503, b"retry-after-ms: 0\r\n")
    count = 0

    def first_few_are_served(number: int) -> bytes | None:
        nonlocal count
        count = number
        return refusal if number > 2 else None

    figures = await figures_of(first_few_are_served, retries=0)
    assert figures.statuses.keys() == {"503"}
    assert len(figures.refusal_s) == figures.statuses["503"]


async def test_an_accepted_call_without_all_its_tokens_is_reported() -> None:
    cut_short = HEAD + b"".join(map(chunk, (usage(0), event(b"[DONE]"))))
    figures = await figures_of(lambda number: cut_short if number > 2 else None)
    assert len(figures.broken) == figures.accepted - 3
    assert "ended with all tokens 3" in "\n".join(lines(figures))


async def test_a_client_error_is_not_retried() -> None:
    figures = await figures_of(lambda number: REFUSAL % (400, b"") if number > 2 else None)
    assert figures.refusal_s == []


async def test_a_server_that_serves_nothing_has_no_capacity() -> None:
    figures = await figures_of(lambda _: REFUSAL % (500, b""))
    assert (figures.capacity_per_s, figures.statuses) == (0, {})


def test_an_unreachable_server_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["overload", "--url", f"http://127.0.0.1:{free_port()}", "--seconds", "1"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_the_peak_of_a_processes_memory_is_in_mib() -> None:
    assert 5 < peak_memory_mib(os.getpid()) < 100_000
