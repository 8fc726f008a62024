"""gRPC carries only control messages and tokens, at any width of the model (engine.proto's first words)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orca.bench.parts.stage_processes import engine_for, new_request
from orca.bench.parts.tiny_families import tiny_checkpoint
from orca.bench.parts.tiny_model import HIDDEN, write_tiny_model
from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb
from orca.worker.controller.controller import Controller
from orca.worker.settings import WorkerSettings
from support.worker.engine_builders import generate

STAGES = 2
WIDTHS = (HIDDEN, 8 * HIDDEN)
VARINT_BYTES = 12
"""Allowed difference of two messages of one kind: times, ports and a token 0. One activation is 896 bytes wider."""
LENGTHS = (9, 1, 6, 14)  # of prompts, or of sources
LONGER = 40  # tokens that sources are longer by
WANTED = (6, 9, 1, 4)

Sizes = dict[str, list[int]]
"""Sizes in bytes of each kind of message, sorted. Steps in flight may overtake each other."""


class CountingController(Controller):
    """A controller that writes down the size of each step, join and result that crosses its gRPC boundary."""

    def __init__(self, settings: WorkerSettings, sizes: Sizes) -> None:
        super().__init__(settings)
        self._sizes = sizes

    async def Run(self, request: pb.StepMessage, context: Any) -> pb.RunReply:  # noqa: N802
        return self._count("Run reply", await super().Run(self._count("Run", request), context))

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:  # noqa: N802
        return self._count("Join reply", await super().Join(self._count("Join", request), context))

    async def Results(self, request: pb.ResultsRequest, context: Any) -> AsyncIterator[pb.ResultMessage]:  # noqa: N802
        async for message in super().Results(self._count("Results", request), context):
            yield self._count("result", message)

    def _count(self, kind: str, message: Any) -> Any:
        self._sizes.setdefault(kind, []).append(message.ByteSize())
        return message


def decoder_only(folder: Path, width: int) -> Path:
    return write_tiny_model(folder, layers=STAGES, hidden=width)


def encoder_decoder(folder: Path, width: int) -> Path:
    """The first stage has the encoder, the second one has the decoder. A token id has one byte."""
    return tiny_checkpoint("bart", folder, vocab_size=127, d_model=width, decoder_attention_heads=4, decoder_layers=3)


async def sizes_of_stages(
    model: Path, *, lengths: Sequence[int] = LENGTHS, decoder_prefix: tuple[int, ...] = ()
) -> list[Sizes]:
    """Run the same requests on real ranks behind counting controllers. Returns: what each stage's controller saw."""
    seen: list[Sizes] = [{} for _ in range(STAGES)]
    controllers = [
        CountingController(
            WorkerSettings(model=str(model), stage=stage, stages=STAGES, threads=1, slots_max=512), seen[stage]
        )
        for stage in range(STAGES)
    ]
    try:
        await asyncio.gather(*(controller.start() for controller in controllers))
        engine = engine_for([controller.address for controller in controllers], uses_local_links=False)
        try:
            epoch = Epoch(1, "test")
            await engine.form(epoch)
            requests = [
                new_request(handle, range(3, length + 3), 9, decoder_prefix=decoder_prefix)
                for handle, length in enumerate(lengths, start=1)
            ]
            await generate(engine, epoch, requests, WANTED, stages=STAGES)
        finally:
            await engine.close()
    finally:
        await asyncio.gather(*(controller.close() for controller in controllers))
    return [{kind: sorted(sizes) for kind, sizes in of_stage.items()} for of_stage in seen]


async def both(*runs: Awaitable[list[Sizes]]) -> tuple[list[Sizes], list[Sizes]]:
    one, other = await asyncio.gather(*runs)
    for sizes, other_sizes in zip(one, other, strict=True):
        assert sizes.keys() == other_sizes.keys() >= {"Run", "Run reply", "Join", "Join reply", "Results"}
    return one, other


def check_equal(one: Sizes, other: Sizes, *, but: str = "") -> None:
    """Compare two stages message by message. Args: but: a kind that may differ."""
    for kind in one.keys() - {but}:
        pairs = zip(one[kind], other[kind], strict=True)
        assert max(abs(size - other_size) for size, other_size in pairs) <= VARINT_BYTES, kind


@pytest.mark.parametrize(("made", "decoder_prefix"), [(decoder_only, ()), (encoder_decoder, (2, 5))])
async def test_bytes_of_each_message_on_grpc_do_not_grow_with_the_hidden_size(
    made: Callable[[Path, int], Path], decoder_prefix: tuple[int, ...], tmp_path: Path
) -> None:
    models = [made(tmp_path / str(width), width) for width in WIDTHS]
    narrow, wide = await both(*(sizes_of_stages(model, decoder_prefix=decoder_prefix) for model in models))
    for narrow_sizes, wide_sizes in zip(narrow, wide, strict=True):
        check_equal(narrow_sizes, wide_sizes)
    # Both ends of the pipeline were seen at work: each step at every stage, and a result of each from the last one.
    assert len({len(sizes["Run"]) for sizes in narrow}) == 1
    assert len(narrow[-1]["result"]) == len(narrow[-1]["Run"]) >= max(WANTED)
    assert all(first["Run"] == second["Run"] for first, second in pairwise(narrow)), "a step is forwarded as it came"


async def test_bytes_on_grpc_grow_with_a_source_by_its_token_ids_alone(tmp_path: Path) -> None:
    """The encoder output of so many tokens more would have 5,120 bytes in each of four messages."""
    model = encoder_decoder(tmp_path, HIDDEN)
    longer = [length + LONGER for length in LENGTHS]
    runs = (sizes_of_stages(model, lengths=lengths, decoder_prefix=(2, 5)) for lengths in (LENGTHS, longer))
    for short_sizes, long_sizes in zip(*(await both(*runs)), strict=True):
        check_equal(short_sizes, long_sizes, but="Run")
        grown = sum(long_sizes["Run"]) - sum(short_sizes["Run"])
        tokens = LONGER * len(LENGTHS)
        assert tokens <= grown <= tokens + len(long_sizes["Run"]) * VARINT_BYTES
