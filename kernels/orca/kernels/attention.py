"""Ragged paged attention for the rows of one step, as stages run it without Triton (reference.py: its meaning).

A step mixes requests in the initiation phase (many tokens each) with requests in the increment phase (one token each),
every one with a context of its own length, scattered over the slots of a paged cache. All increment-phase rows are
computed together, without padding and without a loop over requests; initiation-phase rows run one by one, since each
is a large operation of its own.

Increment phase on a CPU in float32. With S the summed context lengths, H the query heads and B the rows:

    scores  [H x S]   a sparse H*B by slots*2*kv_heads matrix product evaluated only where a row has a position
                      (torch.sparse.sampled_addmm): reads each key where it lies, copies none
    softmax [H x S]   over the segments of the rows
    output  [H x B]   embedding_bag over the cache, weighted by the softmax: reads each value where it lies

So a step reads S * 2 * kv_heads * head_dim elements and writes little else. Gathering padded keys and values first, the
usual way, took 10 times as long on contexts of 20 to 190 tokens. Other devices and dtypes gather S rows (no padding).
"""

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.reference import ContextRow


class RaggedAttention:
    """The geometry of one step under one sliding window: built once, then applied in each layer.

    Args:
        rows: the requests of the step; together they cover each flat token once.
        kv_of_query: for each query head of this rank the KV head (of this rank) it reads.
        kv_heads: KV heads of this rank.
        cache_slots: slots of the cache that the rows point into.
        window: positions a token sees, itself included; None sees all before it.
    """

    def __init__(
        self,
        rows: Sequence[ContextRow],
        kv_of_query: Sequence[int],
        *,
        kv_heads: int,
        cache_slots: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._heads = len(kv_of_query)
        # One KV head per query head in order needs no map.
        is_plain = list(kv_of_query) == list(range(kv_heads))
        self._head_map = None if is_plain else torch.tensor(kv_of_query, device=device)
        singles = [row for row in rows if row.count == 1]
        self._is_all_single = len(singles) == len(rows)
        self._prefills = [_Prefill(row, window, dtype, device) for row in rows if row.count > 1]
        self._decode: _SparseDecode | _GatheredDecode | None = None
        if singles:
            is_sparse = _CAN_SAMPLE and dtype == torch.float32 and device.type == "cpu"
            kind = _SparseDecode if is_sparse else _GatheredDecode
            self._decode = kind(_Segments(singles, window, device), kv_of_query, kv_heads, cache_slots, device)
            self._single_rows = torch.tensor([row.first for row in singles], device=device)
            self._is_in_order = [row.first for row in singles] == list(range(len(singles)))

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float) -> Tensor:
        """Attention of the step's tokens.

        Args:
            qkv: [tokens, query heads + 2 x kv heads, head_dim]: the step's own queries, keys and values.
            cache: [slots, 2 x kv heads, head_dim], the step's own keys and values written already.
            scale: factor of the scores.
        Returns: [tokens, query heads x head_dim].
        """
        tokens, head_dim = qkv.shape[0], qkv.shape[2]
        query = qkv[:, : self._heads]
        if self._decode is not None and self._is_all_single:
            if not self._is_in_order:
                query = query.index_select(0, self._single_rows)
            output = self._decode(query, cache, scale)
            if not self._is_in_order:
                output = torch.empty_like(output).index_copy_(0, self._single_rows, output)
            return output.reshape(tokens, self._heads * head_dim)
        output = qkv.new_empty(tokens, self._heads, head_dim)
        if self._decode is not None:
            decoded = self._decode(query.index_select(0, self._single_rows), cache, scale)
            output.index_copy_(0, self._single_rows, decoded)
        for prefill in self._prefills:
            prefill(output, query, qkv[:, self._heads :], cache, self._head_map, scale)
        return output.view(tokens, self._heads * head_dim)


class _Prefill:
    """One row of several tokens: scaled_dot_product_attention over its own context."""

    def __init__(self, row: ContextRow, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._here = slice(row.first, row.first + row.count)
        context = len(row.slots)
        is_whole = context == row.count
        first_seen = 0 if window is None else max(0, context - row.count + 1 - window)
        # A whole prompt has its keys and values at hand; only a later chunk reads them from the cache.
        self._slots = None if is_whole else row.slots[first_seen:].to(device)
        self._mask: Tensor | None = None
        if not is_whole or (window is not None and window < context):
            first_key = 0 if is_whole else first_seen
            own = torch.arange(context - row.count, context, device=device)[:, None]
            key = torch.arange(first_key, context, device=device)
            is_seen = key <= own
            if window is not None:
                is_seen &= key > own - window
            self._mask = torch.zeros(is_seen.shape, dtype=dtype, device=device).masked_fill_(~is_seen, float("-inf"))

    def __call__(
        self, output: Tensor, query: Tensor, own_kv: Tensor, cache: Tensor, head_map: Tensor | None, scale: float
    ) -> None:
        kv = own_kv[self._here] if self._slots is None else cache.index_select(0, self._slots)
        keys, values = kv.transpose(0, 1).chunk(2)  # [kv heads, context, head_dim] each
        if head_map is not None:
            keys, values = keys.index_select(0, head_map), values.index_select(0, head_map)
        attended = F.scaled_dot_product_attention(
            query[self._here].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scale,
        )
        output[self._here] = attended[0].transpose(0, 1)


class _Segments:
    """The seen positions of all one-token rows, laid end to end: `slots` [S], and where each row's part begins."""

    def __init__(self, rows: Sequence[ContextRow], window: int | None, device: torch.device) -> None:
        seen = [row.slots if window is None else row.slots[-window:] for row in rows]
        self.lengths = torch.tensor([len(slots) for slots in seen], device=device)
        self.slots = torch.cat(seen).to(device)
        self.row_of = torch.repeat_interleave(torch.arange(len(rows), device=device), self.lengths)
        self.starts = F.pad(self.lengths.cumsum(0), (1, 0))  # [B + 1]


class _SparseDecode:
    """All one-token rows at once on a CPU; see the module's head. Matrix rows are (query head, row) in that order."""

    def __init__(
        self, segments: _Segments, kv_of_query: Sequence[int], kv_heads: int, cache_slots: int, device: torch.device
    ) -> None:
        heads, rows, total = len(kv_of_query), len(segments.lengths), len(segments.slots)
        self._shape = (heads, rows)
        self._row_of = segments.row_of
        head = torch.arange(heads, device=device)[:, None]
        self._starts = F.pad((head * total + segments.starts[:-1]).flatten(), (0, 1), value=heads * total)
        key_columns = (segments.slots * (2 * kv_heads) + torch.tensor(kv_of_query, device=device)[:, None]).flatten()
        self._value_columns = key_columns + kv_heads
        self._seen = torch.sparse_csr_tensor(
            self._starts,
            key_columns,
            torch.zeros(heads * total),
            (heads * rows, cache_slots * 2 * kv_heads),
            check_invariants=False,
        )

    def __call__(self, query: Tensor, cache: Tensor, scale: float) -> Tensor:
        heads, rows = self._shape
        head_dim = query.shape[2]
        lines = cache.view(-1, head_dim)  # [slots x 2 x kv heads, head_dim]
        queries = query.transpose(0, 1).reshape(heads * rows, head_dim)
        scores = torch.sparse.sampled_addmm(self._seen, queries, lines.t(), beta=0.0, alpha=scale).values()
        largest = torch.segment_reduce(scores, "max", offsets=self._starts, unsafe=True)
        spread = largest.view(heads, rows).index_select(1, self._row_of)
        weights = (scores.view(heads, -1) - spread).exp_().flatten()
        sums = torch.segment_reduce(weights, "sum", offsets=self._starts, unsafe=True)
        output = F.embedding_bag(
            self._value_columns,
            lines,
            self._starts,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )
        return (output / sums[:, None]).view(heads, rows, head_dim).transpose(0, 1)


class _GatheredDecode:
    """All one-token rows at once on any device and dtype: gathers the seen keys and values, computes in float32."""

    def __init__(
        self, segments: _Segments, kv_of_query: Sequence[int], kv_heads: int, cache_slots: int, device: torch.device
    ) -> None:
        del kv_heads, cache_slots
        self._segments = segments
        self._head_map = torch.tensor(kv_of_query, device=device)

    def __call__(self, query: Tensor, cache: Tensor, scale: float) -> Tensor:
        rows, row_of = query.shape[0], self._segments.row_of
        keys, values = cache.index_select(0, self._segments.slots).float().chunk(2, dim=1)
        keys, values = keys.index_select(1, self._head_map), values.index_select(1, self._head_map)  # [S, heads, dim]
        scores = (query.float().index_select(0, row_of) * keys).sum(-1) * scale  # [S, heads]
        index = row_of[:, None].expand_as(scores)
        largest = scores.new_full((rows, scores.shape[1]), float("-inf"))
        largest.scatter_reduce_(0, index, scores, "amax")
        weights = (scores - largest.index_select(0, row_of)).exp_()
        sums = torch.zeros_like(largest).index_add_(0, row_of, weights)
        output = query.new_zeros(query.shape, dtype=torch.float32)
        output.index_add_(0, row_of, weights[:, :, None] * values)
        return (output / sums[:, :, None]).to(query.dtype)


def _can_sample() -> bool:
    """Whether this build of torch has sampled_addmm for the CPU (it comes with MKL). Takes its one beta warning too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = torch.sparse_csr_tensor([0, 1], [0], [0.0], (1, 1), check_invariants=False)
            torch.sparse.sampled_addmm(one, torch.ones(1, 1), torch.ones(1, 1), beta=0.0)
    except RuntimeError:
        return False
    return True


_CAN_SAMPLE = _can_sample()
