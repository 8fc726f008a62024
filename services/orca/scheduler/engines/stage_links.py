"""The master's gRPC links to all stages of its group, and the process that has the place of each stage."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links, wire
from orca.core.transport.tls_files import TlsFiles
from orca.scheduler.engines.stage_probe import STATUS_S

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.05
_PLACE_S = 2.0
"""Time for which a silent process keeps its stage's place: several times `_POLL_S`, and less than weights load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoading:
    """The progress of a stage that loads, for a progress bar or a log line."""

    stage: int
    permille: int | None  # share of the weights read; None while the stage does not answer
    detail: str


@dataclass(frozen=True, slots=True)
class _StagePlace:
    """The process that is a stage, by its answers to this master."""

    process: str
    answered_s: float  # monotonic clock at its last answer


class StageLinks:
    """The links to the stages of one group."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        silence_s: float,
        certificates: TlsFiles | None,
        on_loading: Callable[[StageLoading], None] | None,
    ) -> None:
        """
        Args:
            silence_s: bound on the silence of a stage while `wait_loaded` waits for it.
            on_loading: called with each change while stages load; None logs it.
        """
        self.addresses = tuple(addresses)
        self._silence_s = silence_s
        self._certificates = certificates
        self._on_loading = on_loading or _log_loading
        self._shown: tuple[bytes, bytes, bytes] | None = None  # certificates with which the channels were opened
        self._channels: list[aio.Channel] = []
        self._places: dict[int, _StagePlace] = {}  # by stage
        self.stubs: list[Any] = []

    @property
    def are_outdated(self) -> bool:
        """True if the links are not open, or were opened with other certificates than the present ones."""
        return not self.stubs or self._present_certificates() != self._shown

    def open(self) -> None:
        """Open the closed links. A channel uses for ever the certificates with which it was opened."""
        self._shown = self._present_certificates()
        self._channels = [grpc_links.open_channel(address, self._certificates) for address in self.addresses]
        self.stubs = [grpc_links.stage_stub(channel) for channel in self._channels]

    async def close(self) -> None:
        channels, self._channels, self.stubs = self._channels, [], []
        for channel in channels:
            await channel.close()

    async def wait_loaded(self) -> list[pb.StatusReply]:
        """Wait until every stage has its weights, for any time; report the progress through `on_loading`.

        Raises: EngineError if a stage does not answer for `silence_s`, or if the stages do not fit together.
        """
        statuses = await all_or_none(self._wait_loaded(stage) for stage in range(len(self.stubs)))
        _require_one_group(statuses)
        return statuses

    async def join_all(self, request: pb.JoinRequest, bound_s: float) -> None:
        """Send every stage into the epoch at the same time. Raises: EngineError with the first refusal."""
        try:
            await all_or_none(_join(stub, request, bound_s) for stub in self.stubs)
        except aio.AioRpcError as error:
            raise EngineError(f"epoch {request.epoch.number}: {error.code().name} {error.details()}") from error

    def _present_certificates(self) -> tuple[bytes, bytes, bytes] | None:
        return None if self._certificates is None else self._certificates.read()

    async def _wait_loaded(self, stage: int) -> pb.StatusReply:
        answered_s = time.monotonic()
        reported: StageLoading | None = None
        while True:
            try:
                status: pb.StatusReply = await self.stubs[stage].Status(pb.StatusRequest(), timeout=STATUS_S)
            except aio.AioRpcError as error:
                detail = f"stage {stage} at {self.addresses[stage]} does not answer: {error.details()}"
                if time.monotonic() - answered_s > self._silence_s:
                    raise EngineError(detail) from error
                now = StageLoading(stage=stage, permille=None, detail=detail)
            else:
                answered_s = time.monotonic()
                self._check_place(stage, status)
                now = StageLoading(stage=stage, permille=status.loaded_permille, detail=status.detail)
                if not self._has_place(stage, status.process, answered_s):
                    detail = "a second process answers while the first lives"
                    now = StageLoading(stage=stage, permille=None, detail=detail)
                elif status.phase != pb.StatusReply.LOADING:
                    if reported is not None:
                        self._on_loading(now)
                    return status
            if reported is None or (now.permille, now.detail) != (reported.permille, reported.detail):
                self._on_loading(now)
            reported = now
            await asyncio.sleep(_POLL_S)

    def _check_place(self, stage: int, status: pb.StatusReply) -> None:
        wire.require_same_contract(status.contract, f"stage {stage}")
        if (status.stage, status.stages) != (stage, len(self.addresses)):
            raise EngineError(
                f"{self.addresses[stage]} serves stage {status.stage} of {status.stages}, "
                f"not stage {stage} of {len(self.addresses)}"
            )

    def _has_place(self, stage: int, process: str, now_s: float) -> bool:
        """Return true if the process has the stage's place, which it gets if the place is free or its holder silent.

        The first process keeps the place while it answers (protocol: stage). Otherwise, if two processes serve one
        address, an epoch could be formed with one process and its steps be sent to the other.
        """
        place = self._places.get(stage)
        if place is not None and place.process != process:
            fields = {"stage": stage, "first": place.process, "second": process}
            if now_s - place.answered_s < _PLACE_S:
                log.warning("a second process answers for a stage and is refused", extra=fields)
                return False
            log.info("another process has a stage's place", extra=fields)
        self._places[stage] = _StagePlace(process, now_s)
        return True


async def all_or_none(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the answers of all calls. Raises: the first error, when no other call is in progress any more."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _join(stub: Any, request: pb.JoinRequest, bound_s: float) -> None:
    await stub.Join(request, timeout=bound_s)


def _require_one_group(statuses: Sequence[pb.StatusReply]) -> None:
    """Raises: EngineError if the stages cannot be parts of one group of one model."""
    first = statuses[0]
    for status in statuses[1:]:
        if (status.revision, status.tensor) != (first.revision, first.tensor):
            raise EngineError(
                f"stage {status.stage} holds revision {status.revision} on {status.tensor} ranks, "
                f"stage 0 holds {first.revision} on {first.tensor}"
            )


def _log_loading(loading: StageLoading) -> None:
    log.info("stage loads", extra={"stage": loading.stage, "permille": loading.permille, "detail": loading.detail})
