"""The data plane of one rank: the process groups of an epoch, and the tensors that travel on them.

There are three groups, each only if it is needed, so that a tensor on one never waits for a tensor on another. `pipe`
carries activations from rank r of a stage to rank r of the next. `feed` carries sampled tokens from the last stage to
the one that embeds them (prefetch). `tensor` joins the ranks of one stage (tensor_link.py). Sends and receives are
posted early and waited for late; that is how they overlap computation (ORCA, section 4.1).

Groups are built directly from the back end's class and not by init_process_group. An epoch's groups end with the epoch,
and a new epoch meets under new keys in the same process.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from orca.core.domain.errors import EngineError
from orca.worker.parallel.progress import RankProgress
from orca.worker.parallel.shard import Shard
from orca.worker.parallel.tensor_link import TensorLink

_PIPE_TAG, _FEED_TAG = 1, 2
_WAIT_S = 86_400.0
"""Time limit of one wait for a peer, longer than any step, because the back ends have no wait without a limit.

A dead peer ends a wait at once. A wait that nobody will end, as between two parts of a network, ends with the epoch.
The master sees that no stage makes progress (scheduler.engines.step_timeout). The rank does not leave its group for the
next epoch, so its controller kills it."""
_SENDS_HELD = 16
"""Sends that may be under way before the oldest is waited for. They are more than the steps that a master keeps in
flight, so the oldest has usually arrived long ago."""


class _LimitedWork:
    """A Gloo send or receive under way, with its own time limit: its group's default is the limit of the forming."""

    def __init__(self, work: Any, limit_s: float) -> None:
        self._work = work
        self._limit = timedelta(seconds=limit_s)

    def wait(self) -> None:
        self._work.wait(self._limit)


class IncomingTensor:
    """A tensor under way to this rank."""

    def __init__(self, work: Any, buffer: Tensor, device: torch.device) -> None:
        self._work = work
        self._buffer = buffer
        self._device = device

    def wait(self) -> Tensor:
        """Return the tensor, on the rank's device. Raises: RuntimeError if the sender died."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._buffer.to(self._device, non_blocking=True)


class EpochGroups:
    """The process groups of one epoch as one rank uses them."""

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
        fed_stage: int = 0,
    ) -> None:
        """
        Args:
            data_host: address at which Gloo peers reach this rank, unless `interface` is set.
            hidden_size, dtype: of the activations.
            fed_stage: the stage that embeds sampled tokens: the one with the decoder's first layer.
        """
        self._shard = shard
        self._fed_stage = fed_stage
        self._progress = progress
        self._device = device
        self._hidden_size = hidden_size
        self._dtype = dtype
        # Gloo sends host memory only, so activations of a CUDA stage are copied to the host first.
        self._link_device = device if uses_nccl else torch.device("cpu")
        self._uses_nccl = uses_nccl
        self._gloo_address = {"hostname": data_host} if interface is None else {"interface": interface}
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
        """Meet the other ranks, and prove every group by one collective.

        Args:
            store: where all ranks of the epoch meet.
            prefix: of its keys.
            timeout_s: time limit for forming each group.
            wait_s: time limit of each wait for a peer later on.
        Raises: RuntimeError or EngineError if a rank does not come.
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
        """Close every link; peers that wait for this rank get an error. Nothing is sent or received afterwards."""
        tensor.attach(None)
        self._sent.clear()
        self._pipe = self._feed = self._store = None

    def send_hidden(self, hidden: Tensor) -> None:
        """Start to send activations [tokens, hidden] to the next stage, and return at once."""
        self._send(self._pipe, hidden, self._number(self._shard.stage + 1, self._shard.rank), _PIPE_TAG)

    def receive_hidden(self, tokens: int) -> IncomingTensor:
        """Start to receive the next step's activations [tokens, hidden] from the stage before, in step order."""
        buffer = torch.empty(tokens, self._hidden_size, dtype=self._dtype, device=self._link_device)
        work = self._pipe.recv([buffer], self._number(self._shard.stage - 1, self._shard.rank), _PIPE_TAG)
        return IncomingTensor(self._limited(work), buffer, self._device)

    def send_device_tokens(self, tokens: Sequence[int] | Tensor) -> None:
        """Start to send a step's sampled token ids to every other rank of the fed stage, and return at once."""
        own = self._number(self._shard.stage, self._shard.rank)
        fed = (self._number(self._fed_stage, rank) for rank in range(self._shard.tensor))
        others = [number for number in fed if number != own]
        if not others:  # a rank that is alone makes no tensor
            return
        data = torch.as_tensor(tokens, dtype=torch.int64)
        for other in others:
            self._send(self._feed, data, other, _FEED_TAG)

    def receive_device_tokens(self, count: int) -> IncomingTensor:
        """Start to receive the token ids of a step that samples `count` of them, in step order."""
        buffer = torch.empty(count, dtype=torch.int64, device=self._link_device)
        sampler = self._number(self._shard.stages - 1, 0)
        work = self._feed.recv([buffer], sampler, _FEED_TAG)
        return IncomingTensor(self._limited(work), buffer, self._device)

    def _number(self, stage: int, rank: int) -> int:
        """Return a rank's number in the groups over all stages."""
        return stage * self._shard.tensor + rank

    def _send(self, group: Any, tensor: Tensor, target: int, tag: int) -> None:
        data = tensor.to(self._link_device).contiguous()
        # The link needs the memory until the send is done, so it is kept. Each send is waited for in the end.
        with self._progress.waiting():
            self._sent.append((self._limited(group.send([data], target, tag)), data))
        while len(self._sent) > _SENDS_HELD:
            with self._progress.waiting():
                self._sent.popleft()[0].wait()

    def _limited(self, work: Any) -> Any:
        # A wait for NCCL only orders streams. A time limit would make the host wait for the device; NCCL's watchdog has
        # its own limit.
        return work if self._uses_nccl else _LimitedWork(work, self._wait_s)

    def _new_group(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        group: Any = (
            self._new_nccl(store, rank, size) if self._uses_nccl else self._new_gloo(store, rank, size, timeout_s)
        )
        proof = torch.ones(1, device=self._link_device)
        group.allreduce([proof]).wait()
        if int(proof.item()) != size:
            raise EngineError(f"the first collective counted {int(proof.item())} of {size} ranks")
        # This limit applies to collectives, and to NCCL's watchdog.
        group._set_default_timeout(timedelta(seconds=self._wait_s))
        return group

    def _new_gloo(self, store: Store, rank: int, size: int, timeout_s: float) -> Any:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Without lazy_init, a missing rank shows now and not in the middle of a step.
        options._devices = [ProcessGroupGloo.create_device(**self._gloo_address, lazy_init=False)]
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        return ProcessGroupGloo(store, rank, size, options)

    def _new_nccl(self, store: Store, rank: int, size: int) -> Any:
        # Absent from builds of torch without CUDA.
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        return ProcessGroupNCCL(store, rank, size, ProcessGroupNCCL.Options())
