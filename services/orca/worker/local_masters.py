"""Masters on this machine, each served over its local link: steps in, the results of its epoch out."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from google.protobuf.message import DecodeError

from orca.core import engine_pb2 as pb
from orca.core import wire
from orca.core.errors import EngineError
from orca.core.frame_stream import encode
from orca.core.local_link import Door, Kind, LocalLink
from orca.core.step import Epoch
from orca.worker.order import ResultLog, Verdict

log = logging.getLogger(__name__)

_HELLO_S = 5.0
"""Bound on a link's first frame: whoever does not know the key holds no socket for longer."""
_TURN_S = 5.0
"""Bound on a step's wait for the one before it. They come in order, so it is not needed while all is well."""


class LocalMasters:
    """The stage's door, and who came through it."""

    def __init__(
        self,
        take_step: Callable[[pb.StepMessage, bytes, float], Awaitable[Verdict]],
        results_of: Callable[[Epoch], ResultLog],
    ) -> None:
        """
        Args:
            take_step: starts a step in its turn; gets its message, that message's bytes and how long it may wait.
            results_of: the results of an epoch. Raises: EngineError when the stage is in another one.
        Raises: OSError when the machine has no such sockets.
        """
        self._take_step = take_step
        self._results_of = results_of
        self._door = Door(self._on_link)
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> pb.LocalAddress:
        """For the stage's Status."""
        return self._door.address

    async def close(self) -> None:
        """End all links and take no more."""
        self._door.close()
        serving = [*self._serving]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def _on_link(self, link: LocalLink) -> None:
        task = asyncio.create_task(self._serve(link))
        self._serving.add(task)

        def on_done(task: asyncio.Task[None]) -> None:
            self._serving.discard(task)
            link.close()

        task.add_done_callback(on_done)

    async def _serve(self, link: LocalLink) -> None:
        """Until the master is gone or its epoch is over; a master that errs is told so, and hung up on."""
        frames = link.frames()
        try:
            async with asyncio.timeout(_HELLO_S):
                kind, payload = await anext(frames)
            hello = pb.LocalHello.FromString(payload)
            if kind is not Kind.HELLO or not self._door.knows(hello):
                log.warning("a local link was refused: it does not show the key")
                return
            results = self._results_of(wire.epoch_from_wire(hello.epoch))
            sending = asyncio.create_task(_send(results, link))
            try:
                async for kind, payload in frames:
                    await self._take(kind, payload)
            finally:
                sending.cancel()
        except (EngineError, TimeoutError) as error:
            link.write(encode(Kind.OVER, str(error).encode()))
        except (ValueError, DecodeError) as error:
            log.warning("a local link was not understood", extra={"detail": str(error)})
        except StopAsyncIteration:
            return  # it went without a word
        finally:
            await frames.aclose()

    async def _take(self, kind: Kind, payload: bytes) -> None:
        """Raises: EngineError when the stage does not take the step, TimeoutError when it is not its turn for long."""
        if kind is not Kind.STEP:
            raise ValueError(f"{kind.name} behind the first frame")
        message = pb.StepMessage.FromString(payload)
        if await self._take_step(message, payload, _TURN_S) is Verdict.WRONG_EPOCH:
            raise EngineError(f"did not take step {message.number}: epoch {message.epoch.number} is over here")


async def _send(results: ResultLog, link: LocalLink) -> None:
    """Send results as they come, and at the epoch's end why it ended."""
    try:
        async for message in results.read(0):
            link.write(encode(Kind.RESULT, message.SerializeToString()))
    except EngineError as error:
        link.write(encode(Kind.OVER, str(error).encode()))
