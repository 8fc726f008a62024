"""Polls how far a start has come: the status of each stage and the readiness of each gateway.

A group is up when all its stages have joined an epoch and its scheduler reports that the group has formed. The system
is up when every group is up and each gateway answers `GET /ready` with 200. There is no time limit: loading may take
long, and the supervisor reports a process that dies.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from orca.cli.up.health_checks import http_status
from orca.cli.up.spec import ProcessSpec, Role
from orca.core.transport import engine_pb2 as pb
from orca.core.transport.grpc_links import open_channel, stage_stub

POLL_S = 0.1
POLL_TIMEOUT_S = 1.0
EPOCH_TIMEOUT_S = 10.0
"""Timeout of a question that is asked only once. A stage that is alive but busy must not look dead; the connection to a
dead stage is refused at once."""


@dataclass(frozen=True, slots=True)
class StartStatus:
    """The progress of one process on its way to readiness."""

    text: str  # a few words for people
    permille: int  # progress; 1000 is up

    @property
    def is_up(self) -> bool:
        return self.permille == 1000

    @property
    def phase(self) -> str:
        """The text without its numbers, so that a change of numbers alone is no new phase."""
        return re.sub(r"\d+", "", self.text)


STARTING = StartStatus("starting", 0)
READY = StartStatus("ready", 1000)


async def wait_until_ready(
    specs: Sequence[ProcessSpec],
    show: Callable[[str, StartStatus], object],
    *,
    reason_of: Callable[[str], str | None] = lambda _: None,
    older_epochs: Mapping[str, int] | None = None,
) -> None:
    """Return when every group has formed and each gateway is ready.

    Args:
        show: gets the name and status of each stage and gateway after each poll.
        reason_of: maps a scheduler's name to the newest reason why its group does not form, or None.
        older_epochs: epoch number by stage name; a stage that is still in this epoch has not joined again. Read again
            at each poll, so it may change meanwhile.
    """
    older = {} if older_epochs is None else older_epochs
    async with contextlib.AsyncExitStack() as stack:
        probes: dict[str, Callable[[], Awaitable[StartStatus]]] = {}
        schedulers = {spec.name: spec.health for spec in specs if spec.role is Role.SCHEDULER}
        for spec in specs:
            if spec.role is Role.WORKER:
                stub = stage_stub(await stack.enter_async_context(open_channel(spec.address)))
                probes[spec.name] = partial(
                    _ask_stage, stub, spec, schedulers.get(spec.scheduler or ""), reason_of, older
                )
            elif spec.role is Role.GATEWAY:
                probes[spec.name] = partial(_ask_gateway, spec.address)
        while True:
            statuses = await asyncio.gather(*(ask() for ask in probes.values()))
            for name, status in zip(probes, statuses, strict=True):
                show(name, status)
            if all(status.is_up for status in statuses):
                return
            await asyncio.sleep(POLL_S)


async def epochs_of(stages: Sequence[ProcessSpec]) -> dict[str, int]:
    """Return the number of the last epoch that each stage joined, by name. Stages that do not answer are left out."""
    found: dict[str, int] = {}
    for spec in stages:
        async with open_channel(spec.address) as channel:
            if (status := await _status(stage_stub(channel), EPOCH_TIMEOUT_S)) is not None:
                found[spec.name] = status.epoch.number
    return found


async def _ask_stage(
    stub: Any,
    spec: ProcessSpec,
    scheduler_address: str | None,
    reason_of: Callable[[str], str | None],
    older_epochs: Mapping[str, int],
) -> StartStatus:
    status = await _status(stub)
    if status is None:
        return STARTING
    if status.phase == pb.StatusReply.LOADING:
        if status.loaded_permille == 0 and status.detail:  # a first start compiles kernels
            return StartStatus(status.detail, 0)
        # The last tenth stands for meeting the other stages.
        return StartStatus(f"loading weights {status.loaded_permille // 10} %", status.loaded_permille * 9 // 10)
    if (
        status.phase == pb.StatusReply.JOINED
        and status.epoch.number > older_epochs.get(spec.name, 0)
        # Ask the scheduler after the stage: by the time that stages have joined again, a broken group is reported.
        and (scheduler_address is None or await _is_ready(scheduler_address))
    ):
        return READY
    if status.phase in (pb.StatusReply.IDLE, pb.StatusReply.JOINED):
        reason = reason_of(spec.scheduler) if spec.scheduler is not None else None
        return StartStatus(f"waiting for the group{f': {reason}' if reason else ''}", 900)
    if status.phase == pb.StatusReply.FAILED:
        return StartStatus(f"failed: {status.detail}", 0)
    return STARTING


async def _status(stub: Any, within_s: float = POLL_TIMEOUT_S) -> pb.StatusReply | None:
    try:
        status: pb.StatusReply = await stub.Status(pb.StatusRequest(), timeout=within_s)
    except grpc.RpcError:
        return None
    return status


async def _ask_gateway(address: str) -> StartStatus:
    return READY if await _is_ready(address) else STARTING


async def _is_ready(address: str) -> bool:
    return await http_status(address, "/ready", POLL_TIMEOUT_S) == 200
