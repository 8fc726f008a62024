"""Masters on this machine, each served over its local link: steps in, the results of its epoch out.

If the stage is a single rank, the link of a master that has shown the key is handed on to that rank, which serves it
(master_link.py). Through this process, a step and its result would take two more hops between processes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from google.protobuf.message import DecodeError

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import wire
from orca.core.transport.frame_stream import encode
from orca.core.transport.local_link import LinkFrameKind, LocalLink, LocalListener, read_step
from orca.worker.controller.step_order import ResultLog, StepVerdict

log = logging.getLogger(__name__)

_HELLO_S = 5.0
"""Time limit of a link's first frame: a peer that does not know the key holds no socket for longer."""
_FLUSH_S = 5.0
"""Time limit for a master to read the last frames that were sent to it."""
_TURN_S = 5.0
"""Time limit of a step's wait for the step before it. Steps come in order, so it does not matter while all is well."""


class LocalMasters:
    """Accepts local links of masters and serves them."""

    def __init__(
        self,
        take_step: Callable[[pb.StepMessage, bytes, float], Awaitable[StepVerdict]],
        results_of: Callable[[Epoch], ResultLog],
        hand_on: Callable[[Epoch, LocalLink], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            take_step: starts a step in its turn; gets its message, the message's bytes, and how long it may wait.
            results_of: returns the results of an epoch. Raises: EngineError if the stage is in another one.
            hand_on: gives the link of an epoch to the rank that serves it; None: it is served here.
                Raises: EngineError if the epoch is over, OSError if the rank is gone and its death is not known yet.
        Raises: OSError if the machine has no such sockets.
        """
        self._take_step = take_step
        self._results_of = results_of
        self._hand_on = hand_on
        self._door = LocalListener(self._on_link)
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> pb.LocalAddress:
        """The address of local links, for the stage's Status."""
        return self._door.address

    async def close(self) -> None:
        """End all links, and accept no more."""
        self._door.close()
        serving = [*self._serving]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def _on_link(self, link: LocalLink) -> None:
        task = asyncio.create_task(self._attend(link))
        self._serving.add(task)

        def on_done(task: asyncio.Task[None]) -> None:
            self._serving.discard(task)
            link.close()

        task.add_done_callback(on_done)

    async def _attend(self, link: LocalLink) -> None:
        """Serve a link until the master is gone or its epoch is over. After an error, send the reason and close it."""
        frames = link.frames()
        try:
            epoch = wire.epoch_from_wire(await self._door.read_hello(link, frames, _HELLO_S))
            results = self._results_of(epoch)
            if self._hand_on is None:
                await self._serve(link, frames, results)
            else:
                await self._hand_on(epoch, link)
        except PermissionError as error:
            log.warning("a local link was refused: %s", error)
        except EngineError as error:
            await _send_over(link, str(error))
        except (ValueError, DecodeError) as error:
            log.warning("a local link sent an invalid frame", extra={"detail": str(error)})
        except OSError as error:
            log.info("a local link was not served, gRPC reports why", extra={"detail": str(error)})
        except Exception as error:
            log.exception("serving a local link failed")
            await _send_over(link, f"{type(error).__name__}: {error}")
        finally:
            await frames.aclose()

    async def _serve(
        self, link: LocalLink, frames: AsyncIterator[tuple[LinkFrameKind, bytes]], results: ResultLog
    ) -> None:
        """Take steps and send results until one of the two ends.

        Raises: the error that ended it, unless the master has gone.
        """
        working = [asyncio.create_task(self._take_all(frames)), asyncio.create_task(_send(results, link))]
        try:
            done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for task in reversed(working):  # the end of the epoch explains more than a refused step
                if task in done and (error := task.exception()) is not None:
                    raise error
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    async def _take_all(self, frames: AsyncIterator[tuple[LinkFrameKind, bytes]]) -> None:
        async for kind, payload in frames:
            await self._take(kind, payload)

    async def _take(self, kind: LinkFrameKind, payload: bytes) -> None:
        """Take one step. Raises: EngineError if the stage does not take it; what read_step raises."""
        message = read_step(kind, payload)
        try:
            verdict = await self._take_step(message, payload, _TURN_S)
        except TimeoutError as error:
            raise EngineError(str(error)) from error
        if verdict is StepVerdict.WRONG_EPOCH:
            raise EngineError(f"did not take step {message.number}: epoch {message.epoch.number} is over here")


async def _send_over(link: LocalLink, reason: str) -> None:
    """Send the last frame, after the results that are still on their way."""
    link.write(encode(LinkFrameKind.OVER, reason.encode()))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FLUSH_S):
            await link.flush()


async def _send(results: ResultLog, link: LocalLink) -> None:
    """Send results as they come. Raises: EngineError with the reason when the epoch ends."""
    async for message in results.read(0):
        link.write(encode(LinkFrameKind.RESULT, message.SerializeToString()))
