"""The link among the ranks of one stage, over the process group of the present epoch."""

from typing import Any

import torch
from torch import Tensor

from orca.core.domain.errors import EngineError
from orca.worker.parallel.progress import RankProgress


class TensorLink:
    """A rank's TensorGroup (worker.parallel.shard). It outlives epochs; each epoch attaches its own process group."""

    def __init__(self, size: int, progress: RankProgress) -> None:
        self.size = size
        self._progress = progress
        self._group: Any = None

    def attach(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor of any shape and type that the back end takes over the ranks of the stage, in place."""
        if self.size > 1:
            # This blocks no other group: each has its own threads or stream.
            with self._progress.waiting():
                self._open_group().allreduce([tensor]).wait()
        return tensor

    def all_gather_last(self, tensor: Tensor, sizes: list[int]) -> Tensor:
        """Concatenate the ranks' tensors along the last dimension.

        Args:
            tensor: [..., sizes[rank]].
            sizes: of the last dimension of every rank.
        Returns: [..., sum(sizes)], the same on every rank.
        """
        if self.size == 1:
            return tensor
        # The back ends require equal shapes: narrower shards are padded, and the padding is cut off again.
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
