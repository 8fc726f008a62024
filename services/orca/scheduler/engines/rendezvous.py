"""The rendezvous of an epoch's ranks: a small key-value store in the scheduler process, emptied for each epoch.

It lives outside the ranks so that survivors of a dead rank can meet again. It needs no torch: the ranks call it through
worker.parallel.process_groups.RendezvousStore, a torch.distributed store. Keys begin with the epoch's prefix, so a late
rank of an old epoch cannot write anything.
"""

import asyncio

import grpc
from grpc import aio

from orca.core.domain.errors import EngineError
from orca.core.domain.step import Epoch
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import grpc_links
from orca.core.transport.tls_files import TlsFiles


def key_prefix(epoch: Epoch) -> str:
    """Return the prefix of all keys of an epoch."""
    return f"{epoch.number}/{epoch.holder}/"


class RendezvousServer:
    """Server of the Rendezvous service."""

    def __init__(self, listen: str, certificates: TlsFiles | None = None) -> None:
        """
        Args:
            listen: host:port to serve on; port 0 uses a free port.
            certificates: None encrypts nothing.
        """
        self._listen = listen
        self._certificates = certificates
        self._server: aio.Server | None = None
        self._values: dict[str, bytes] = {}
        self._prefix: str | None = None
        self._changed = asyncio.Condition()
        self.address = ""

    async def start(self) -> None:
        """Serve, if it does not yet. Raises: EngineError if the address is in use or a certificate cannot be read."""
        if self._server is not None:
            return
        server = grpc_links.new_server()
        grpc_links.serve_rendezvous(server, self)
        try:
            port = grpc_links.listen(server, self._listen, self._certificates)
        except RuntimeError as error:
            raise EngineError(f"rendezvous: cannot listen on {self._listen}") from error
        await server.start()
        self._server = server
        self.address = f"{self._listen.rpartition(':')[0]}:{port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def open(self, epoch: Epoch) -> None:
        """Forget everything and serve this epoch only; waiting calls of an older epoch fail."""
        async with self._changed:
            self._values.clear()
            self._prefix = key_prefix(epoch)
            self._changed.notify_all()

    # The methods of the service; engine.proto gives them their names.

    async def Set(self, request: pb.StoreSet, context: aio.ServicerContext) -> pb.StoreEmpty:  # noqa: N802
        async with self._changed:
            await self._require_epoch([request.key], context)
            self._values[request.key] = request.value
            self._changed.notify_all()
        return pb.StoreEmpty()

    async def Get(self, request: pb.StoreGet, context: aio.ServicerContext) -> pb.StoreValues:  # noqa: N802
        keys = list(request.keys)

        def is_over() -> bool:
            return not self._is_epoch(keys) or all(key in self._values for key in keys)

        async with self._changed:
            try:
                # A timeout of 0 checks without waiting, and then wait_for would not check at all.
                if not is_over():
                    await asyncio.wait_for(self._changed.wait_for(is_over), request.timeout_ms / 1000)
            except TimeoutError:
                missing = [key for key in keys if key not in self._values]
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"nobody set {', '.join(missing)}")
            await self._require_epoch(keys, context)
            return pb.StoreValues(values=[self._values[key] for key in keys])

    async def Add(self, request: pb.StoreAdd, context: aio.ServicerContext) -> pb.StoreCount:  # noqa: N802
        async with self._changed:
            await self._require_epoch([request.key], context)
            count = int(self._values.get(request.key, b"0")) + request.amount
            # Decimal text, as torch's own stores keep counters: a rank may read one with get.
            self._values[request.key] = b"%d" % count
            self._changed.notify_all()
        return pb.StoreCount(value=count)

    async def CompareSet(  # noqa: N802
        self, request: pb.StoreCompareSet, context: aio.ServicerContext
    ) -> pb.StoreValues:
        async with self._changed:
            await self._require_epoch([request.key], context)
            present = self._values.get(request.key, b"")
            if present == request.expected:
                self._values[request.key] = present = request.desired
                self._changed.notify_all()
        return pb.StoreValues(values=[present])

    async def Delete(self, request: pb.StoreGet, context: aio.ServicerContext) -> pb.StoreCount:  # noqa: N802
        async with self._changed:
            await self._require_epoch(list(request.keys), context)
            deleted = sum(self._values.pop(key, None) is not None for key in request.keys)
        return pb.StoreCount(value=deleted)

    def _is_epoch(self, keys: list[str]) -> bool:
        return self._prefix is not None and all(key.startswith(self._prefix) for key in keys)

    async def _require_epoch(self, keys: list[str], context: aio.ServicerContext) -> None:
        if not self._is_epoch(keys):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this epoch is over")
