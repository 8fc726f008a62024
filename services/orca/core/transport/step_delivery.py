"""Sends a step to a stage's controller. The master uses this for the first stage, each stage for the next one."""

import asyncio
import time
from typing import Any

import grpc
from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.transport import engine_pb2 as pb

_BOUND_S = 5.0
"""Longest time of a delivery, repeats included: a controller answers without computing."""
_PAUSE_S = 0.02
"""Pause before a call that did not reach the stage is repeated."""


class StepDelivery:
    """One step on its way. The constructor makes the call, and not the wait, so that steps are sent in order."""

    def __init__(self, stub: Any, message: pb.StepMessage) -> None:
        """Args: stub: client of the stage's Stage service."""
        self._stub = stub
        self._message = message
        self._deadline = time.monotonic() + _BOUND_S
        self._call = stub.Run(message, timeout=_BOUND_S)

    async def wait_until_taken(self) -> None:
        """Wait until the stage has taken the step. Repeating the call is harmless: steps are numbered.

        Raises: EngineError that says what the stage did instead; the message continues a sentence with its name.
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
