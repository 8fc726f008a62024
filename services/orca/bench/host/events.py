"""How many events gateways stream, and what each costs: many streams at once, tokens at a given rate, and perhaps
more streams whose requests wait behind them all the time.

The client is this process, whose time is not counted. Each stream is looked at when all have ended: ids must count all
tokens, and the text be that of what the engine drew.
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

from orca.bench.client import EventStream, Target, post_bytes
from orca.bench.host.null_engine import drawn
from orca.bench.host.parts import (
    HostFailed,
    running_gateway,
    running_redis,
    running_scheduler,
    until_healthy,
)
from orca.core.domain.model import ModelInfo
from orca.core.domain.text import OutputText, Tokenizer
from orca.core.process.batched import batched
from orca.core.process.cpu_time import cpu_time_s

OPENED_AT_ONCE = 32
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """What gateways are given to do."""

    gateways: int = 1  # processes of one pool, which share the streams
    streams: int  # at a time, all from the start to the end
    waiting: int = 0  # further streams, whose requests wait to the end
    tokens_per_s: float  # of all streams together, one of each in a step
    new_tokens: int  # of each stream
    prompt_tokens: int

    @property
    def step_us(self) -> int:
        return round(1e6 * self.streams / self.tokens_per_s)

    def call(self, target: Target) -> bytes:
        """One call as it goes over the wire."""
        body = {"model": target.model, "prompt": [1] * self.prompt_tokens, "max_tokens": self.new_tokens}
        return post_bytes(target, {**body, "temperature": 0, "ignore_eos": True, "stream": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What it took, from the first step to the last event, with all streams open before."""

    gateways: int
    streams: int
    waiting: int
    tokens_per_s: float  # asked for
    events: int  # of tokens
    pieces: int  # in which the client read them
    seconds: float
    gateway_s: float  # processor time of all of them, as the others
    scheduler_s: float
    redis_s: float


class KeptStream(EventStream):
    """Keeps what comes, to be read behind the measurement."""

    def __init__(self, target: Target, request: bytes) -> None:
        super().__init__(request)
        self.target = target
        self.answered: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )  # its head is there, or its end
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


async def measure_events(model: ModelInfo, asked: Streams, folder: Path) -> Streamed:
    """Raises: HostFailed."""
    sizes = {"batch_size": asked.streams, "step_us": asked.step_us}
    with ExitStack() as stack:
        server = stack.enter_context(running_redis(folder))
        gateways = [
            stack.enter_context(running_gateway(server, model, folder, number)) for number in range(asked.gateways)
        ]
        scheduler = stack.enter_context(running_scheduler(server, model, folder, **sizes))
        for gateway in gateways:
            await until_healthy(gateway)
        await scheduler.until_seated()
        targets = islice(cycle(gateway.target for gateway in gateways), asked.streams + asked.waiting)
        opened = [KeptStream(target, asked.call(target)) for target in targets]
        # The oldest run first, all at once, and no other one before their end.
        streams, waiting = opened[: asked.streams], opened[asked.streams :]
        try:
            await _open(streams)
            await _open(waiting)
            pids = [server.redis.pid, scheduler.pid, *(gateway.pid for gateway in gateways)]
            start_s, before = perf_counter(), [cpu_time_s(pid) for pid in pids]
            scheduler.go()
            await asyncio.gather(*(stream.ended for stream in streams))
            seconds = perf_counter() - start_s
            if any(stream.error is not None for stream in waiting):
                raise HostFailed("a stream ended whose request was to wait")
            used = [cpu_time_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
        finally:
            for stream in opened:
                stream.close()
    tokenizer = Tokenizer.from_folder(model.folder)
    for stream in streams:
        _check(stream, asked.new_tokens, model, tokenizer)
    redis_s, scheduler_s, *each_s = used
    return Streamed(
        gateways=asked.gateways,
        streams=asked.streams,
        waiting=asked.waiting,
        tokens_per_s=asked.tokens_per_s,
        events=asked.streams * asked.new_tokens,
        pieces=sum(stream.pieces for stream in streams),
        seconds=seconds,
        gateway_s=sum(each_s),
        scheduler_s=scheduler_s,
        redis_s=redis_s,
    )


async def _open(streams: Sequence[KeptStream]) -> None:
    """Call for them, and wait until each has the head of its answer. Raises: HostFailed."""
    loop = asyncio.get_running_loop()
    for some in batched(streams, OPENED_AT_ONCE):
        for stream in some:
            host, port = stream.target.host, stream.target.port
            await loop.create_connection(lambda stream=stream: stream, host, port)  # type: ignore[misc]
        await asyncio.gather(*(stream.answered for stream in some))
    if wrong := [stream for stream in streams if stream.status != 200 or stream.ended.done()]:
        raise HostFailed(f"{len(wrong)} of {len(streams)} calls were not answered: {wrong[0].status} {wrong[0].error}")


def _check(stream: KeptStream, count: int, model: ModelInfo, tokenizer: Tokenizer) -> None:
    """Raises: HostFailed when a stream is not the events of the tokens that were drawn for it, each once, in order."""
    if stream.error is not None:
        raise HostFailed(f"a stream ended: {stream.error}")
    ids, events = zip(*(_event(block) for block in stream.text.split(b"\n\n")[:-1]), strict=True)
    request_id = f"{events[0]['id']}.0"
    if list(ids) != [*(f"0.{index}" for index in range(count)), "0.end", "end"]:
        raise HostFailed(f"the stream of {request_id} has not {count} events of tokens and its two ends, in order")
    wanted = OutputText(tokenizer)
    texts = [wanted.push(drawn(request_id, index, model.vocab_size)).text for index in range(count)]
    if [event["choices"][0]["text"] for event in events[:-1]] != [*texts, wanted.flush()]:
        raise HostFailed(f"the stream of {request_id} has not the text of what was drawn for it")


def _event(block: bytes) -> tuple[str, Any]:
    """Id and content of an event, of `[DONE]` nothing."""
    head, _, data = block.partition(b"\n")
    is_last = data + b"\n\n" == DONE
    return head.removeprefix(b"id: ").decode(), None if is_last else orjson.loads(data.removeprefix(b"data: "))
