"""The master's local link to a rank that is a whole stage: steps in, results out, and no process in between.

The stage's controller has heard who is there (local_masters.py) and hands the socket on. It still forms and ends the
epoch, watches the rank and tells the master by gRPC why the epoch is over.
"""

import logging
import socket
import threading
import time

from google.protobuf.message import DecodeError

from orca.core.domain.errors import EngineError
from orca.core.transport.frame_socket import FrameSocket
from orca.core.transport.frame_stream import FRAME_BYTES_MAX, encode
from orca.core.transport.local_link import LinkFrameKind, read_step
from orca.worker.messages import frames
from orca.worker.messages.frames import Kind
from orca.worker.messages.inbox import Inbox

log = logging.getLogger(__name__)


class MasterLink:
    """The rank's end, for one epoch. A thread of its own reads it, until either side ends it."""

    def __init__(self, connection: socket.socket, epoch: int, arrived: bytes, inbox: Inbox) -> None:
        """
        Args:
            arrived: what was read of it behind its first frame.
            inbox: gets the steps.
        """
        self._frames = FrameSocket(connection, LinkFrameKind, arrived=arrived, frame_bytes_max=FRAME_BYTES_MAX)
        self._epoch = epoch
        self._inbox = inbox

    def start(self) -> None:
        """Take steps. Once the link is known to who answers them."""
        threading.Thread(target=self._read, name="master-link", daemon=True).start()

    def send(self, result: bytes) -> None:
        """ResultMessage bytes. A master that is gone gets none; one that does not read is waited for."""
        try:
            self._frames.write(encode(LinkFrameKind.RESULT, result))
        except OSError:
            log.debug("a result found its master gone")

    def end(self, reason: str = "") -> None:
        """Take no more steps, and say why. Wakes who waits in `send`; from any thread, and more than once."""
        self._frames.end(encode(LinkFrameKind.OVER, reason.encode()) if reason else b"")

    def _read(self) -> None:
        try:
            while (frame := self._frames.read()) is not None:
                received_ns = time.monotonic_ns()
                step = read_step(*frame)
                if step.epoch.number != self._epoch:
                    raise EngineError(f"did not take step {step.number}: epoch {step.epoch.number} is over here")
                self._inbox.put((Kind.STEP, frames.step_payload(received_ns, frame[1])))
        except EngineError as error:
            self.end(str(error))
        except (ValueError, DecodeError) as error:
            log.warning("a local link was not understood", extra={"detail": str(error)})
        except Exception as error:
            log.exception("serving a local link failed")
            self.end(f"{type(error).__name__}: {error}")
        finally:
            self.end()
            self._frames.close()
