"""Parts of the engine's tests: waiting for results and errors, and a driver that plays the scheduler."""

import asyncio
import functools
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orca.core.domain.engine import Engine
from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch, NewRequest, Part, Row, Step, StepResult
from support import waiting

SCRIPTED_RANK = (sys.executable, str(Path(__file__).with_name("scripted_rank.py")))

until = functools.partial(waiting.until, limit_s=60.0)


async def error_of(awaitable: Awaitable[Any], limit_s: float = 60.0) -> EngineError:
    """The EngineError that ends `awaitable`."""
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(awaitable, limit_s)
    return caught.value


async def next_result(engine: Engine, limit_s: float = 60.0) -> StepResult:
    """The next result that nobody has read."""
    return await asyncio.wait_for(anext(engine.results()), limit_s)


@dataclass(slots=True)
class _Running:
    """A request as the driver knows it."""

    new: NewRequest
    wanted: int  # tokens to generate
    chunk: int | None  # most known tokens per step
    scheduled: int = 0  # positions that are in some step
    in_flight: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def _known(self) -> int:
        """Tokens to run before the first one is drawn: prompt and log, without a source."""
        return len(self.new.target)

    def source_row(self) -> tuple[Row, ...]:
        """Its source, which enters whole with its first step; nothing for a decoder-only model."""
        if self.scheduled or not self.new.source_tokens:
            return ()
        return (Row(handle=self.new.handle, start=0, count=self.new.source_tokens, sample=False, part=Part.SOURCE),)

    def next_row(self, prefetch: int) -> Row | None:
        """Its part of the next step; None when it has to wait or is done."""
        asked = max(0, self.scheduled - self._known + 1)  # tokens that the steps so far draw
        if self.in_flight > prefetch or asked >= self.wanted:
            return None
        if self.scheduled < self._known:
            count = min(self._known - self.scheduled, self.chunk or self._known)
            token = None
        else:
            count = 1
            token = None if prefetch else self.tokens[-1]
        is_last = self.scheduled + count >= self._known
        part = Part.TARGET if self.new.decoder_prefix else Part.UNSPECIFIED
        row = Row(handle=self.new.handle, start=self.scheduled, count=count, sample=is_last, token=token, part=part)
        self.scheduled += count
        self.in_flight += 1
        return row


async def generate(
    engine: Engine,
    epoch: Epoch,
    requests: Sequence[NewRequest],
    wanted: Sequence[int],
    *,
    stages: int,
    prefetch: int = 0,
    batch: int = 3,
    chunk: int | None = None,
    arrive_at_once: bool = False,
    steps_before: int = 0,
) -> dict[int, list[int]]:
    """Play a simple scheduler: at most `batch` requests run in a step, `stages` steps are in flight, and request i
    arrives at step i or all arrive at once. The epoch has had `steps_before`.

    Returns: the tokens of each handle. Every request is freed in the end.
    """
    running = [_Running(new, count, chunk) for new, count in zip(requests, wanted, strict=True)]
    steps: dict[int, list[_Running]] = {}
    seen: set[int] = set()
    freed: set[int] = set()
    results = engine.results()
    number = steps_before
    while len(freed) < len(running):
        while len(steps) < stages + prefetch:
            number += 1
            ended = tuple(
                each.new.handle
                for each in running
                if each.new.handle not in freed and len(each.tokens) == each.wanted and not each.in_flight
            )
            chosen, sources, rows = [], list[Row](), list[Row]()
            for each in running if arrive_at_once else running[: number - steps_before]:
                source = each.source_row()
                row = each.next_row(prefetch) if len(rows) < batch else None
                if row is not None:
                    sources += source
                    chosen.append(each)
                    rows.append(row)
            if not rows and not ended and len(seen) == len(running):
                number -= 1
                break
            added = tuple(each.new for each in chosen if each.new.handle not in seen)
            seen.update(new.handle for new in added)
            freed.update(ended)
            steps[number] = chosen
            await engine.submit(Step(epoch=epoch, number=number, freed=ended, new=added, rows=(*sources, *rows)))
        if not steps:
            continue
        result = await asyncio.wait_for(anext(results), 60)
        drawn = {sampled.handle: sampled.token.id for sampled in result.sampled}
        for each in steps.pop(result.number):
            each.in_flight -= 1
            if each.new.handle in drawn:
                each.tokens.append(drawn[each.new.handle])
    while steps:
        steps.pop((await asyncio.wait_for(anext(results), 60)).number)
    return {each.new.handle: each.tokens for each in running}
