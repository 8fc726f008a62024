"""Ragged paged attention for the rows of one step, as stages run it without Triton (reference.py: its meaning).

A step mixes requests in the initiation phase (many tokens each) with requests in the increment phase (one token each),
every one with a context of its own length, scattered over the slots of a paged cache. All increment-phase rows are
computed together, without padding and without a loop over requests; initiation-phase rows run one by one, since each
is a large operation of its own.

Increment phase on a CPU in float32, for B rows of like length L (longest) and H query heads:

    scores  [H x B x L]  a sparse H*B by (lines of the cache) matrix product evaluated only where a row has a position
                         (torch.sparse.sampled_addmm): reads each key where it lies, copies none
    weights [H x B x L]  exp(score - largest score), 0 for the padding behind shorter rows
    output  [H x B]      embedding_bag over the cache, weighted: reads each value where it lies; over the sum of weights

Padding costs little: it reads one line, which stays in the processor's cache. Rows of very different lengths are
computed in groups (`_alike`). So a step reads 2 x (sum of contexts) x kv_heads x head_dim elements and writes little
else; what it takes is the memory's time. Gathering padded keys and values first, the usual way, took 10 times as long
on contexts of 20 to 190 tokens. Other devices and dtypes gather all positions, laid end to end (no padding).
"""

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from orca.kernels.paged import Places
from orca.kernels.reference import ContextRow

_PADDING_FREE = 512
"""Positions of padding that a group of rows may have though they are more than its own positions."""


class RaggedAttention:
    """The geometry of one step under one sliding window: built once, then applied in each layer.

    Args:
        rows: the requests of the step; together they cover each flat token once.
        kv_of_query: for each query head of this rank the KV head (of this rank) it reads.
        kv_heads: KV heads of this rank.
        cache_slots: slots of the cache that the rows point into, in blocks of `block_tokens`.
        window: positions a token sees, itself included; None sees all before it.
    """

    def __init__(
        self,
        rows: Sequence[ContextRow],
        kv_of_query: Sequence[int],
        *,
        kv_heads: int,
        cache_slots: int,
        block_tokens: int,
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
        self._prefills = [_Prefill(row, block_tokens, window, dtype, device) for row in rows if row.count > 1]
        self._decode: _SparseDecode | _GatheredDecode | None = None
        if singles:
            is_sparse = _CAN_SAMPLE and dtype == torch.float32 and device.type == "cpu"
            seen = [row.slots if window is None else row.slots[-window:] for row in singles]
            if is_sparse:
                self._decode = _SparseDecode(seen, kv_of_query, kv_heads, cache_slots, block_tokens)
            else:
                self._decode = _GatheredDecode(seen, kv_of_query, block_tokens, device)
            self._single_rows = torch.tensor([row.first for row in singles], device=device)
            self._is_in_order = [row.first for row in singles] == list(range(len(singles)))

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float) -> Tensor:
        """Attention of the step's tokens.

        Args:
            qkv: [tokens, query heads + 2 x kv heads, head_dim]: the step's own queries, keys and values.
            cache: [blocks, 2 x kv heads, block_tokens, head_dim] (paged.py), the step's own keys and values written
                already.
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

    def __init__(
        self, row: ContextRow, block_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._here = slice(row.first, row.first + row.count)
        context = len(row.slots)
        is_whole = context == row.count
        first_seen = 0 if window is None else max(0, context - row.count + 1 - window)
        # A whole prompt has its keys and values at hand; only a later chunk reads them from the cache.
        self._seen = None if is_whole else Places.of(row.slots[first_seen:].to(device), block_tokens)
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
        kv = own_kv[self._here] if self._seen is None else self._seen.read(cache)
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


class _SparseDecode:
    """All one-token rows at once on a CPU; see the module's head.

    Args:
        seen: per row the slots of the positions that it sees.
    """

    def __init__(
        self, seen: Sequence[Tensor], kv_of_query: Sequence[int], kv_heads: int, cache_slots: int, block_tokens: int
    ) -> None:
        groups = _alike([len(slots) for slots in seen])
        self._groups = [
            _AlikeDecode([seen[row] for row in rows], kv_of_query, kv_heads, cache_slots, block_tokens)
            for rows in groups
        ]
        self._rows = [torch.tensor(rows) for rows in groups]

    def __call__(self, query: Tensor, cache: Tensor, scale: float) -> Tensor:
        if len(self._groups) == 1:
            return self._groups[0](query, cache, scale)
        output = torch.empty(query.shape, dtype=query.dtype)
        for rows, group in zip(self._rows, self._groups, strict=True):
            output.index_copy_(0, rows, group(query.index_select(0, rows), cache, scale))
        return output


class _AlikeDecode:
    """One-token rows, padded to the longest. A line is what the cache holds for one head and slot: a key or a value."""

    def __init__(
        self, seen: Sequence[Tensor], kv_of_query: Sequence[int], kv_heads: int, cache_slots: int, block_tokens: int
    ) -> None:
        heads, rows, longest = len(kv_of_query), len(seen), max(map(len, seen))
        lines = cache_slots * 2 * kv_heads
        # The padding reads a line that somebody has written: any other might be no number.
        slots = pad_sequence(list(seen), batch_first=True, padding_value=int(seen[0][0]))
        is_padding = torch.arange(longest) >= torch.tensor([len(each) for each in seen])[:, None]
        mask = torch.zeros(rows, longest).masked_fill_(is_padding, float("-inf"))
        head = torch.tensor(kv_of_query)[:, None, None]
        keys = (slots // block_tokens * (2 * kv_heads) + head) * block_tokens + slots % block_tokens
        keys = keys.to(torch.int32 if lines < 2**31 else torch.int64)
        self._shape = (heads, rows)
        self._values = (keys + kv_heads * block_tokens).view(heads * rows, longest)
        self._seen = torch.sparse_csr_tensor(
            torch.arange(heads * rows + 1, dtype=keys.dtype) * longest,
            keys.flatten(),
            mask.repeat(heads, 1).flatten(),
            (heads * rows, lines),
            check_invariants=False,
        )

    def __call__(self, query: Tensor, cache: Tensor, scale: float) -> Tensor:
        """Attention of [rows, heads, head_dim]."""
        head_dim = query.shape[2]
        lines = cache.view(-1, head_dim)
        queries = query.transpose(0, 1).reshape(-1, head_dim)
        scores = torch.sparse.sampled_addmm(self._seen, queries, lines.t(), beta=1.0, alpha=scale).values()
        # Not by softmax: sums of whole numbers must stay exact (worker/models/chain.py), so the division comes last.
        weights = scores.view(self._values.shape)
        weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
        output = F.embedding_bag(self._values, lines, mode="sum", per_sample_weights=weights)
        output.div_(weights.sum(dim=-1, keepdim=True))
        return output.view(*self._shape, head_dim).transpose(0, 1)


class _GatheredDecode:
    """All one-token rows at once on any device and dtype: gathers the seen keys and values, computes in float32.

    Args:
        seen: per row the slots of the positions that it sees; they are laid end to end.
    """

    def __init__(
        self, seen: Sequence[Tensor], kv_of_query: Sequence[int], block_tokens: int, device: torch.device
    ) -> None:
        lengths = torch.tensor([len(slots) for slots in seen], device=device)
        self._places = Places.of(torch.cat(list(seen)).to(device), block_tokens)
        self._row_of = torch.repeat_interleave(torch.arange(len(seen), device=device), lengths)
        self._head_map = torch.tensor(kv_of_query, device=device)

    def __call__(self, query: Tensor, cache: Tensor, scale: float) -> Tensor:
        rows, row_of = query.shape[0], self._row_of
        keys, values = self._places.read(cache).float().chunk(2, dim=1)
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


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Rows in groups in which padding to the longest at most doubles the work, but for a little."""
    groups: list[list[int]] = []
    longest = total = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        total += lengths[row]
        if groups and longest * (len(groups[-1]) + 1) <= 2 * total + _PADDING_FREE:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = total = lengths[row]
    return [sorted(rows) for rows in groups]


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
