"""The store where the ranks of an epoch meet. Its values live in the scheduler (service Rendezvous)."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import grpc
from torch.distributed.distributed_c10d import Store

from orca.core.domain.errors import EngineError
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import engine_pb2_grpc, grpc_links
from orca.core.transport.tls_files import TlsFiles


class RendezvousStore(Store):
    """A torch.distributed store over gRPC.

    The back ends call it from C++ threads. It has many methods but is one idea: they are those that torch's Python
    bridge looks up.
    """

    def __init__(self, address: str, timeout_s: float, certificates: TlsFiles | None = None) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._channel = grpc_links.open_blocking_channel(address, certificates)
        self._stub = engine_pb2_grpc.RendezvousStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the link. A thread that waits in a call gets an error at once. Any thread may call it."""
        self._channel.close()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call(self._stub.Set, pb.StoreSet(key=key, value=data), self._timeout_s)

    def get(self, key: str) -> bytes:
        return self._get([key], self._timeout_s)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._get(keys, self._timeout_s)

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._get(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def add(self, key: str, value: int) -> int:
        reply = self._call(self._stub.Add, pb.StoreAdd(key=key, amount=value), self._timeout_s)
        return int(reply.value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = (
            text.encode() if isinstance(text, str) else bytes(text) for text in (expected_value, desired_value)
        )
        message = pb.StoreCompareSet(key=key, expected=expected, desired=desired)
        return bytes(self._call(self._stub.CompareSet, message, self._timeout_s).values[0])

    def check(self, keys: list[str]) -> bool:
        try:
            self._call(self._stub.Get, pb.StoreGet(keys=keys, timeout_ms=0), self._timeout_s, is_quiet=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return False
            raise EngineError(f"rendezvous: {error.details()}") from error
        return True

    def delete_key(self, key: str) -> bool:
        return bool(self._call(self._stub.Delete, pb.StoreGet(keys=[key]), self._timeout_s).value)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def has_extended_api(self) -> bool:
        return True

    def _get(self, keys: list[str], timeout_s: float) -> list[bytes]:
        message = pb.StoreGet(keys=keys, timeout_ms=max(1, int(timeout_s * 1000)))
        return [bytes(value) for value in self._call(self._stub.Get, message, timeout_s + 1.0).values]

    def _call(self, method: Any, message: Any, timeout_s: float, *, is_quiet: bool = False) -> Any:
        try:
            return method(message, timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if is_quiet:
                raise
            raise EngineError(f"rendezvous: {error.details()}") from error
        except ValueError as error:  # the channel was closed by close()
            raise EngineError("rendezvous: this join was given up") from error
