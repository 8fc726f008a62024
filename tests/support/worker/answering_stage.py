"""A stage that does nothing but answer, on a link with certificates, and who asks it."""

import contextlib
from collections.abc import AsyncIterator

from grpc import aio

from orca.core.transport import engine_pb2 as pb
from orca.core.transport import engine_pb2_grpc, grpc_links
from orca.core.transport.tls_files import TlsFiles


class _Answering(engine_pb2_grpc.StageServicer):
    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:  # noqa: N802, ARG002
        return pb.StatusReply(process="here")


@contextlib.asynccontextmanager
async def serving(shown: TlsFiles) -> AsyncIterator[str]:
    """Address of such a stage."""
    server = grpc_links.new_server()
    grpc_links.serve_stage(server, _Answering())
    port = grpc_links.listen(server, "127.0.0.1:0", shown)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(channel: aio.Channel, limit_s: float = 10.0) -> str:
    """Returns: "here". Raises: AioRpcError when one of the two refuses the other. The channel is closed."""
    async with channel:
        reply = await grpc_links.stage_stub(channel).Status(pb.StatusRequest(), timeout=limit_s, wait_for_ready=False)
        return str(reply.process)
