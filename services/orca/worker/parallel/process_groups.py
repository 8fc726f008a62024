"""The data plane of one rank: the process groups of an epoch, and what travels on them.

Three groups, each only where it is needed, so that what is on one never waits behind what is on another:
`pipe` carries activations from rank r of a stage to rank r of the next, `feed` carries sampled tokens from the last
stage to the first (prefetch), `tensor` joins the ranks of one stage. Sends and receives are posted early and waited for
late; that is how they overlap computation (ORCA, section 4.1).

Groups are built straight on the back end's class and not through init_process_group: an epoch's groups go with it, and
a new epoch meets under new keys in the same process.
"""

import logging
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import grpc
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from orca.core.domain.errors import EngineError
from orca.core.transport import engine_pb2 as pb
from orca.core.transport import engine_pb2_grpc, grpc_links
from orca.core.transport.certificates import Certificates
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard

log = logging.getLogger(__name__)

_PIPE_TAG, _FEED_TAG = 1, 2
_WAIT_S = 86_400.0
"""Bound on one wait for a peer, above any step: how long a step takes is nobody's business here, and the back ends know
no wait without a bound. A dead peer ends a wait at once. A wait that is lost, as between two parts of a network, ends
with the epoch: the master sees that no stage moves (scheduler.engines.step_timeout), and the rank, which does not leave
its group for the next epoch, is killed by its controller."""
_SENDS_HELD = 16
"""Sends that may be under way before the oldest is waited for. More than the steps that a master keeps in flight, so
in practice a send is waited for when it has long arrived."""


class RendezvousStore(Store):
    """A torch.distributed store whose values live in the scheduler (service Rendezvous).

    The back ends call it from C++ threads; the methods' names are those that torch's Python bridge looks up.
    """

    def __init__(self, address: str, timeout_s: float, certificates: Certificates | None = None) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._channel = grpc_links.open_blocking_channel(address, certificates)
        self._stub = engine_pb2_grpc.RendezvousStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Drop the link; a thread that waits in a call gets an error at once. May be called from any thread."""
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


class TensorLink:
    """A rank's TensorGroup (worker.parallel.shard) over a process group: it outlives epochs, the process group does
    not."""

    def __init__(self, size: int, progress: RankProgress) -> None:
        self.size = size
        self._progress = progress
        self._group: Any = None

    def attach(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks of the stage, in place. Any shape and type that the back end takes."""
        if self.size > 1:
            # Blocks no other group: each has its own threads or stream.
            with self._progress.waiting():
                self._open_group().allreduce([tensor]).wait()
        return tensor

    def all_gather_last(self, tensor: Tensor, sizes: list[int]) -> Tensor:
        """Concatenate the ranks' tensors along the last dimension.

        Args: tensor [..., sizes[rank]]; sizes of the last dimension of every rank.
        Returns: [..., sum(sizes)], the same on every rank.
        """
        if self.size == 1:
            return tensor
        # The back ends want equal shapes: narrower shards are padded, the padding is cut off again.
        width = max(sizes)
        if tensor.shape[-1] < width:
            tensor = torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in sizes]
        with self._progress.waiting():
            self._open_group().allgather([parts], [tensor.contiguous()]).wait()
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def _open_group(self) -> Any:
        if self._group is None:
            raise EngineError("the ranks of this stage are in no epoch")
        return self._group


class _Bounded:
    """A Gloo send or receive under way. Its group's default bound stays the one of the forming, so it has its own."""

    def __init__(self, work: Any, bound_s: float) -> None:
        self._work = work
        self._bound = timedelta(seconds=bound_s)

    def wait(self) -> None:
        self._work.wait(self._bound)


class Inbound:
    """A tensor under way to this rank."""

    def __init__(self, work: Any, buffer: Tensor, device: torch.device) -> None:
        self._work = work
        self._buffer = buffer
        self._device = device

    def wait(self) -> Tensor:
        """The tensor, on the rank's device. Raises: RuntimeError when the sender died."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._buffer.to(self._device, non_blocking=True)


class Groups:
    """The groups of one epoch as one rank uses them."""

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        *,
        uses_nccl: bool,
        data_host: str,
        interface: str | None,
        hidden_size: int,
        dtype: torch.dtype,
        progress: RankProgress,
    ) -> None:
        """
        Args:
            data_host: address under which Gloo peers reach this rank, unless `interface` names whose.
            hidden_size, dtype: of the activations.
        """
        self._shard = shard
        self._progress = progress
        self._device = device
        self._hidden_size = hidden_size
        self._dtype = dtype
        # Gloo sends host memory only: with it, activations of a CUDA stage make a detour.
        self._link_device = device if uses_nccl else torch.device("cpu")
        self._uses_nccl = uses_nccl
        self._gloo_end = {"hostname": data_host} if interface is None else {"interface": interface}
        self._store: Store | None = None
        self._pipe: Any = None
        self._feed: Any = None
        self._wait_s = _WAIT_S
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def form(
        self,
        store: Store,
        prefix: str,
        tensor: TensorLink,
        *,
        feeds_tokens: bool,
        timeout_s: float,
        wait_s: float = _WAIT_S,
    ) -> None:
        """Meet the other ranks and prove every group by one collective.

        Args: store where all ranks of the epoch meet; prefix of its keys; timeout_s for each group's forming;
            wait_s bounds each wait for a peer later on.
        Raises: RuntimeError or EngineError when somebody does not come.
        """
        shard = self._shard
        self._store = store
        self._wait_s = wait_s
        whole = (self._number(shard.stage, shard.rank), shard.stages * shard.tensor)
        if shard.stages > 1:
            self._pipe = self._new_group(PrefixStore(f"{prefix}pipe", store), *whole, timeout_s)
        if feeds_tokens and whole[1] > 1:
            self._feed = self._new_group(PrefixStore(f"{prefix}feed", store), *whole, timeout_s)
        if shard.tensor > 1:
            own = PrefixStore(f"{prefix}tensor{shard.stage}", store)
            tensor.attach(self._new_group(own, shard.rank, shard.tensor, timeout_s))

    def leave(self, tensor: TensorLink) -> None:
        """Close every link; peers that wait on this rank get an error. Nothing is sent or received afterwards."""
        tensor.attach(None)
        self._sent.clear()
        self._pipe = self._feed = self._store = None

    def send_hidden(self, hidden: Tensor) -> None:
        """Start sending activations [tokens, hidden] to the next stage; returns at once."""
        self._send(self._pipe, hidden, self._number(self._shard.stage + 1, self._shard.rank), _PIPE_TAG)

    def receive_hidden(self, tokens: int) -> Inbound:
        """Start receiving the next step's activations [tokens, hidden] from the stage before, in step order."""
        buffer = torch.empty(tokens, self._hidden_size, dtype=self._dtype, device=self._link_device)
        work = self._pipe.recv([buffer], self._number(self._shard.stage - 1, self._shard.rank), _PIPE_TAG)
        return Inbound(self._bounded(work), buffer, self._device)

    def send_device_tokens(self, tokens: Sequence[int] | Tensor) -> None:
        """Start sending a step's sampled token ids to every other rank of the first stage; returns at once."""
        own = self._number(self._shard.stage, self._shard.rank)
        firsts = (self._number(0, rank) for rank in range(self._shard.tensor))
        others = [number for number in firsts if number != own]
        if not others:  # a rank that is alone need not make a tensor
            return
        data = torch.as_tensor(tokens, dtype=torch.int64)
        for other in others:
            self._send(self._feed, data, other, _FEED_TAG)

    def receive_device_tokens(self, count: int) -> Inbound:
        """Start receiving the sampled token ids of a step that sampled `count`, in step order."""
        buffer = torch.empty(count, dtype=torch.int64, device=self._link_device)
        sampler = self._number(self._shard.stages - 1, 0)
        work = self._feed.recv([buffer], sampler, _FEED_TAG)
        return Inbound(self._bounded(work), buffer, self._device)

    def _number(self, stage: int, rank: int) -> int:
        """A rank's number in the groups over all stages."""
        return stage * self._shard.tensor + rank

    def _send(self, group: Any, tensor: Tensor, target: int, tag: int) -> None:
        data = tensor.to(self._link_device).contiguous()
        # The memory is the link's until the send is done, so it is kept; and each send is waited for in the end.
        with self._progress.waiting():
            self._sent.append((self._bounded(group.send([data], target, tag)), data))
        while len(self._sent) > _SENDS_HELD:
            with self._progress.waiting():
                self._sent.popleft()[0].wait()

    def _bounded(self, work: Any) -> Any:
        # NCCL's works only order streams. A bound would make the host wait for the device; the watchdog has its own.
        return work if self._uses_nccl else _Bounded(work, self._wait_s)

    def _new_group(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        group: Any = (
            self._new_nccl(store, rank, size) if self._uses_nccl else self._new_gloo(store, rank, size, timeout_s)
        )
        proof = torch.ones(1, device=self._link_device)
        group.allreduce([proof]).wait()
        if int(proof.item()) != size:
            raise EngineError(f"the first collective counted {int(proof.item())} of {size} ranks")
        # What counts for collectives, and for NCCL's watchdog.
        group._set_default_timeout(timedelta(seconds=self._wait_s))
        return group

    def _new_gloo(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # lazy_init off: who is not there shows now, not in the middle of a step.
        options._devices = [ProcessGroupGloo.create_device(**self._gloo_end, lazy_init=False)]
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        return ProcessGroupGloo(store, rank, size, options)

    def _new_nccl(self, store: Store, rank: int, size: int) -> Any:
        # Absent from builds of torch without CUDA.
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        return ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())
