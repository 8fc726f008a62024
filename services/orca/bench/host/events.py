"""Measures how many events per second gateways stream, and the processor time per event.

Many streams are open at once, and tokens come at a given rate. More streams may be open whose requests wait during the
whole run. The client is this process, and its time does not count. When all streams have ended, each is checked: the
event ids must count all tokens, and the text must be that of the engine's tokens.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import orjson

from orca.bench.client import EventStream, LoadTarget, post_bytes
from orca.bench.host.null_engine import expected_token
from orca.bench.host.parts import (
    HostFailed,
    running_gateway,
    running_redis,
    running_scheduler,
    wait_until_healthy,
)
from orca.core.domain.model import ModelInfo
from orca.core.domain.text import OutputText, Tokenizer
from orca.core.process.batched import batched
from orca.core.process.cpu_time import cpu_time_s

OPENED_AT_ONCE = 32
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLoad:
    """The work for the gateways."""

    gateways: int = 1  # processes on one pool, which share the streams
    streams: int  # concurrent ones, from the start of the run to its end
    waiting: int = 0  # further streams whose requests wait until the end
    tokens_per_s: float  # of all streams together; a step has one token of each
    new_tokens: int  # of each stream
    prompt_tokens: int

    @property
    def step_us(self) -> int:
        return round(1e6 * self.streams / self.tokens_per_s)

    def encoded_call(self, target: LoadTarget) -> bytes:
        """Return the bytes of one HTTP call."""
        body = {"model": target.model, "prompt": [1] * self.prompt_tokens, "max_tokens": self.new_tokens}
        return post_bytes(target, {**body, "temperature": 0, "ignore_eos": True, "stream": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """The measurements of a run, from the first step to the last event; all streams are open before."""

    gateways: int
    streams: int
    waiting: int
    tokens_per_s: float  # wanted rate
    events: int  # one per token
    pieces: int  # reads of the client for these events
    seconds: float
    gateway_s: float  # processor time of all gateways
    scheduler_s: float  # processor time of the scheduler
    redis_s: float  # processor time of Redis


class RecordedStream(EventStream):
    """A stream whose bytes are stored and parsed after the measurement."""

    def __init__(self, target: LoadTarget, request: bytes) -> None:
        super().__init__(request)
        self.target = target
        # Done when the head of the answer has arrived, or the stream has ended.
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pieces = 0

    def _read_events(self) -> None:
        if not self.answered.done():
            self.answered.set_result(None)
        else:
            self.pieces += 1
        if self._body.endswith(DONE):
            self._finish(None)

    def _finish(self, error: str | None) -> None:
        super()._finish(error)
        if not self.answered.done():
            self.answered.set_result(None)

    @property
    def text(self) -> bytes:
        return bytes(self._body)


async def measure_events(model: ModelInfo, load: StreamLoad, folder: Path) -> StreamFigures:
    """Run the load once and return its measurements. Raises: HostFailed."""
    sizes = {"batch_size": load.streams, "step_us": load.step_us}
    with ExitStack() as stack:
        server = stack.enter_context(running_redis(folder))
        gateways = [
            stack.enter_context(running_gateway(server, model, folder, number)) for number in range(load.gateways)
        ]
        scheduler = stack.enter_context(running_scheduler(server, model, folder, **sizes))
        for gateway in gateways:
            await wait_until_healthy(gateway)
        await scheduler.wait_until_seated()
        targets = islice(cycle(gateway.target for gateway in gateways), load.streams + load.waiting)
        opened = [RecordedStream(target, load.encoded_call(target)) for target in targets]
        # The scheduler runs the oldest requests first: all of these in one batch, and the others only after their end.
        streams, waiting = opened[: load.streams], opened[load.streams :]
        try:
            await _open(streams)
            await _open(waiting)
            pids = [server.redis.pid, scheduler.pid, *(gateway.pid for gateway in gateways)]
            start_s, before = perf_counter(), [cpu_time_s(pid) for pid in pids]
            scheduler.start_group()
            await asyncio.gather(*(stream.ended for stream in streams))
            seconds = perf_counter() - start_s
            if any(stream.error is not None for stream in waiting):
                raise HostFailed("a stream ended although its request should have waited")
            used = [cpu_time_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
        finally:
            for stream in opened:
                stream.close()
    tokenizer = Tokenizer.from_folder(model.folder)
    for stream in streams:
        _check(stream, load.new_tokens, model, tokenizer)
    redis_s, scheduler_s, *each_s = used
    return StreamFigures(
        gateways=load.gateways,
        streams=load.streams,
        waiting=load.waiting,
        tokens_per_s=load.tokens_per_s,
        events=load.streams * load.new_tokens,
        pieces=sum(stream.pieces for stream in streams),
        seconds=seconds,
        gateway_s=sum(each_s),
        scheduler_s=scheduler_s,
        redis_s=redis_s,
    )


async def _open(streams: Sequence[RecordedStream]) -> None:
    """Open the streams and wait for the head of each answer. Raises: HostFailed."""
    loop = asyncio.get_running_loop()
    for some in batched(streams, OPENED_AT_ONCE):
        for stream in some:
            host, port = stream.target.host, stream.target.port
            await loop.create_connection(lambda stream=stream: stream, host, port)  # type: ignore[misc]
        await asyncio.gather(*(stream.answered for stream in some))
    if wrong := [stream for stream in streams if stream.status != 200 or stream.ended.done()]:
        raise HostFailed(f"{len(wrong)} of {len(streams)} calls were not answered: {wrong[0].status} {wrong[0].error}")


def _check(stream: RecordedStream, count: int, model: ModelInfo, tokenizer: Tokenizer) -> None:
    """Check that a stream has one event for each token of its engine, in order, with the right text.

    Raises: HostFailed.
    """
    if stream.error is not None:
        raise HostFailed(f"a stream ended: {stream.error}")
    ids, events = zip(*(_event(block) for block in stream.text.split(b"\n\n")[:-1]), strict=True)
    request_id = f"{events[0]['id']}.0"
    if list(ids) != [*(f"0.{index}" for index in range(count)), "0.end", "end"]:
        raise HostFailed(f"the stream of {request_id} does not have {count} token events and two end events in order")
    wanted = OutputText(tokenizer)
    texts = [wanted.push(expected_token(request_id, index, model.vocab_size)).text for index in range(count)]
    if [event["choices"][0]["text"] for event in events[:-1]] != [*texts, wanted.flush()]:
        raise HostFailed(f"the stream of {request_id} does not have the text of its engine's tokens")


def _event(block: bytes) -> tuple[str, Any]:
    """Return the id and the content of an event; the content of `[DONE]` is None."""
    head, _, data = block.partition(b"\n")
    is_last = data + b"\n\n" == DONE
    return head.removeprefix(b"id: ").decode(), None if is_last else orjson.loads(data.removeprefix(b"data: "))
