"""How far a start has come: asks stages for their status and the gateway whether it is ready.

A group is up when all its stages have joined an epoch and its scheduler says that it has formed, the system when every
group is and the gateway's `GET /ready` says 200. There is no limit in time: loading takes as long as it takes, and a
process that dies is the supervisor's to report.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from orca.cli.up.questions import http_status
from orca.cli.up.spec import ProcessSpec, Role
from orca.core.transport import engine_pb2 as pb
from orca.core.transport.grpc_links import open_channel, stage_stub

POLL_S = 0.1
ANSWER_S = 1.0
"""Bound on one question."""
EPOCH_S = 10.0
"""On the one that is asked once: a stage that lives and is only busy must not be taken for a dead one, which is refused
at once."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one process stands on its way up."""

    text: str  # a few words for people
    permille: int  # of the way; 1000 is up

    @property
    def is_up(self) -> bool:
        return self.permille == 1000

    @property
    def phase(self) -> str:
        """The text without its numbers: the same while only they change."""
        return re.sub(r"\d+", "", self.text)


STARTING = Standing("starting", 0)
READY = Standing("ready", 1000)


async def wait_until_ready(
    specs: Sequence[ProcessSpec],
    show: Callable[[str, Standing], object],
    *,
    why: Callable[[str], str | None] = lambda _: None,
    older_epochs: Mapping[str, int] | None = None,
) -> None:
    """Return when every group has formed and the gateway is ready.

    Args:
        show: gets name and standing of each stage and gateway on the way.
        why: the newest reason why the group of a scheduler, given by its name, does not form; None while there is none.
        older_epochs: by the name of a stage; one that is still in such an epoch has not joined again. Looked at anew
            each time.
    """
    older = {} if older_epochs is None else older_epochs
    async with contextlib.AsyncExitStack() as stack:
        probes: dict[str, Callable[[], Awaitable[Standing]]] = {}
        schedulers = {spec.name: spec.health for spec in specs if spec.role is Role.SCHEDULER}
        for spec in specs:
            if spec.role is Role.WORKER:
                stub = stage_stub(await stack.enter_async_context(open_channel(spec.address)))
                probes[spec.name] = partial(_ask_stage, stub, spec, schedulers.get(spec.scheduler or ""), why, older)
            elif spec.role is Role.GATEWAY:
                probes[spec.name] = partial(_ask_gateway, spec.address)
        while True:
            standings = await asyncio.gather(*(ask() for ask in probes.values()))
            for name, standing in zip(probes, standings, strict=True):
                show(name, standing)
            if all(standing.is_up for standing in standings):
                return
            await asyncio.sleep(POLL_S)


async def epochs_of(stages: Sequence[ProcessSpec]) -> dict[str, int]:
    """Number of the last epoch that each stage joined, by name; those that do not answer are left out."""
    found: dict[str, int] = {}
    for spec in stages:
        async with open_channel(spec.address) as channel:
            if (status := await _status(stage_stub(channel), EPOCH_S)) is not None:
                found[spec.name] = status.epoch.number
    return found


async def _ask_stage(
    stub: Any,
    spec: ProcessSpec,
    scheduler_address: str | None,
    why: Callable[[str], str | None],
    older_epochs: Mapping[str, int],
) -> Standing:
    status = await _status(stub)
    if status is None:
        return STARTING
    if status.phase == pb.StatusReply.LOADING:
        if status.loaded_permille == 0 and status.detail:  # a first start compiles kernels
            return Standing(status.detail, 0)
        # The last tenth is meeting the other stages.
        return Standing(f"loading weights {status.loaded_permille // 10} %", status.loaded_permille * 9 // 10)
    if (
        status.phase == pb.StatusReply.JOINED
        and status.epoch.number > older_epochs.get(spec.name, 0)
        # Asked behind the stage: a group that broke up has said so by the time that its stages have joined again.
        and (scheduler_address is None or await _is_ready(scheduler_address))
    ):
        return READY
    if status.phase in (pb.StatusReply.IDLE, pb.StatusReply.JOINED):
        reason = why(spec.scheduler) if spec.scheduler is not None else None
        return Standing(f"waiting for the group{f': {reason}' if reason else ''}", 900)
    if status.phase == pb.StatusReply.FAILED:
        return Standing(f"failed: {status.detail}", 0)
    return STARTING


async def _status(stub: Any, within_s: float = ANSWER_S) -> pb.StatusReply | None:
    try:
        status: pb.StatusReply = await stub.Status(pb.StatusRequest(), timeout=within_s)
    except grpc.RpcError:
        return None
    return status


async def _ask_gateway(address: str) -> Standing:
    return READY if await _is_ready(address) else STARTING


async def _is_ready(address: str) -> bool:
    return await http_status(address, "/ready", ANSWER_S) == 200
