"""gRPC carries only control messages and tokens, at any width of the model (engine.proto's first words)."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from orca.bench.parts.stage_processes import engine_for, new_request
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
LENGTHS = (9, 1, 6, 14)  # of prompts
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


async def sizes_of_stages(model: Path) -> list[Sizes]:
    """Run the same requests on real ranks behind counting controllers. Returns: what each stage's controller saw."""
    seen: list[Sizes] = [{} for _ in range(STAGES)]
    controllers = [
        CountingController(
            WorkerSettings(model=str(model), stage=stage, stages=STAGES, threads=1, slots_max=256), seen[stage]
        )
        for stage in range(STAGES)
    ]
    try:
        await asyncio.gather(*(controller.start() for controller in controllers))
        engine = engine_for([controller.address for controller in controllers], uses_local_links=False)
        try:
            epoch = Epoch(1, "test")
            await engine.form(epoch)
            requests = [new_request(handle, range(1, length + 1), 9) for handle, length in enumerate(LENGTHS, start=1)]
            await generate(engine, epoch, requests, WANTED, stages=STAGES)
        finally:
            await engine.close()
    finally:
        await asyncio.gather(*(controller.close() for controller in controllers))
    return [{kind: sorted(sizes) for kind, sizes in of_stage.items()} for of_stage in seen]


async def test_bytes_of_each_message_on_grpc_do_not_grow_with_the_hidden_size(tmp_path: Path) -> None:
    models = [write_tiny_model(tmp_path / str(width), layers=STAGES, hidden=width) for width in WIDTHS]
    narrow, wide = await asyncio.gather(*(sizes_of_stages(model) for model in models))
    for narrow_sizes, wide_sizes in zip(narrow, wide, strict=True):
        assert narrow_sizes.keys() == wide_sizes.keys() >= {"Run", "Run reply", "Join", "Join reply", "Results"}
        for kind, sizes in narrow_sizes.items():
            pairs = zip(sizes, wide_sizes[kind], strict=True)
            assert max(abs(one - other) for one, other in pairs) <= VARINT_BYTES, kind
    # Both ends of the pipeline were seen at work: each step at every stage, and a result of each from the last one.
    assert len({len(sizes["Run"]) for sizes in narrow}) == 1
    assert len(narrow[-1]["result"]) == len(narrow[-1]["Run"]) >= max(WANTED)
    assert all(first["Run"] == second["Run"] for first, second in pairwise(narrow)), "a step is forwarded as it came"
