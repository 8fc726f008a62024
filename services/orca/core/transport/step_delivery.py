"""Handing a step to a stage's controller: the master does it to the first stage, each stage to the next one."""

import asyncio
import time
from typing import Any

import grpc
from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.transport import engine_pb2 as pb

_BOUND_S = 5.0
"""On a hand-over, repeats included: a controller answers without computing."""
_PAUSE_S = 0.02
"""Before a call is repeated that did not reach the stage."""


class StepDelivery:
    """One step on its way. The call is made here and not when it is waited for: steps go on the wire in their order."""

    def __init__(self, stub: Any, message: pb.StepMessage) -> None:
        """stub: client of the stage's Stage service."""
        self._stub = stub
        self._message = message
        self._deadline = time.monotonic() + _BOUND_S
        self._call = stub.Run(message, timeout=_BOUND_S)

    async def wait_until_taken(self) -> None:
        """Wait until the stage has taken the step. Repeating the call is harmless: steps are numbered.

        Raises: EngineError with what the stage did instead, to be told behind its name.
        """
        while True:
            try:
                reply = await self._call
                break
            except aio.AioRpcError as error:
                left_s = self._deadline - time.monotonic()
                if error.code() is not grpc.StatusCode.UNAVAILABLE or left_s <= _PAUSE_S:
                    detail = f"did not take step {self._message.number}: {error.code().name} {error.details()}"
                    raise EngineError(detail) from error
            await asyncio.sleep(_PAUSE_S)
            self._call = self._stub.Run(self._message, timeout=max(0.001, self._deadline - time.monotonic()))
        if reply.verdict == pb.RunReply.WRONG_EPOCH:
            raise EngineError(f"is in epoch {reply.epoch.number}, not {self._message.epoch.number}")
