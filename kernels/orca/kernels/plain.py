"""The kernels of device.py in PyTorch's own operations, for any device.

Attention computes all increment-phase rows (one token each) together: it gathers their keys and values into one tensor,
without padding and without a loop over requests. Initiation-phase rows run one by one, since each is a large operation
of its own.
"""

import ctypes
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.paged import TokenSlots
from orca.kernels.contract.reference import (
    AttentionView,
    ContextRow,
    DistanceBias,
    KvWrite,
    ModelSizes,
    NormParameters,
)


class PlainKernels:
    """Kernels for any device."""

    def prepare(self, sizes: ModelSizes) -> bool:  # noqa: ARG002
        """Return False: PyTorch's operations are compiled already."""
        return False

    def attention(self, rows: Sequence[ContextRow], view: AttentionView) -> "PlainAttention":
        return PlainAttention(rows, view)

    def deferred(self) -> AbstractContextManager[None]:
        return nullcontext()

    def recorder(self, device: torch.device) -> None:
        """Return None: PyTorch's operations run when they are called and cannot be recorded."""

    def increment(self, at: int) -> None:
        ctypes.c_int64.from_address(at).value += 1

    def sampler(self, vocab: int, device: torch.device) -> None:
        """Return None: the host draws tokens."""

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def embed(
        self,
        table: Tensor,
        ids: Tensor,
        places: Tensor | None,
        positions: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
    ) -> Tensor:
        embedded = table.index_select(0, ids).to(dtype)
        if scale != 1.0:
            embedded.mul_(scale)
        return embedded if places is None else embedded.add_(places.index_select(0, positions))

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(dim=-1)

    def mask_tokens(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        bits = (masks[:, :, None] >> torch.arange(32, device=masks.device, dtype=torch.int32)) & 1
        is_left_out = bits.flatten(1)[:, : logits.shape[1]] == 0
        logits[rows] = logits[rows].masked_fill_(is_left_out, -math.inf)

    def write_kv(self, qkv: Tensor, kv: KvWrite, bias: Tensor | None = None) -> None:
        if bias is not None:
            qkv += bias.view(qkv.shape[1:])
        lines = kv.cache.shape[1]
        rotated = qkv[:, : qkv.shape[1] - lines // 2]
        if kv.head_norm is not None:
            normed = F.rms_norm(rotated, (qkv.shape[2],), None, kv.head_norm.eps)
            torch.mul(normed, kv.head_norm.weight, out=rotated)
        if kv.rotations is not None:
            pairs = rotated.view(*rotated.shape[:-1], -1, 2)
            if qkv.dtype == torch.float32:
                torch.view_as_complex(pairs).mul_(kv.rotations)
            else:
                pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(kv.rotations)))
        TokenSlots.of(kv.slots, kv.cache.shape[2]).write(kv.cache, qkv[:, -lines:])

    def normalise(self, x: Tensor, norm: NormParameters) -> Tensor:
        size = norm.weight.shape
        if norm.bias is None:
            return F.rms_norm(x, size, norm.weight, norm.eps)
        return F.layer_norm(x, size, norm.weight, norm.bias, norm.eps)

    def add_normalise(self, x: Tensor, added: Tensor, norm: NormParameters, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            x += added
        else:
            x.copy_(x.float() + added + bias)
        return self.normalise(x, norm)

    def activate(
        self, x: Tensor, activation: Activation, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        result = activation(x if bias is None else x + bias)
        return result if out is None else out.copy_(result)

    def gated(self, gate_up: Tensor, activation: Activation, bias: Tensor | None = None) -> Tensor:
        gate, up = (gate_up if bias is None else gate_up + bias).chunk(2, dim=-1)
        return activation(gate).mul_(up)


class PlainAttention:
    """The geometry of one step. Args: those of device.Kernels.attention."""

    def __init__(self, rows: Sequence[ContextRow], view: AttentionView) -> None:
        device = view.device
        self._heads = len(view.kv_of_query)
        # With one KV head per query head, in order, no map is needed.
        is_plain = list(view.kv_of_query) == list(range(view.kv_heads))
        self._head_map = None if is_plain else torch.tensor(view.kv_of_query, device=device)
        singles = [row for row in rows if row.count == 1]
        self._is_all_single = len(singles) == len(rows)
        self._prefills = [_Prefill(row, view) for row in rows if row.count > 1]
        self._decode: _GatheredDecode | None = None
        if singles:
            self._decode = _GatheredDecode(singles, view)
            self._single_rows = torch.tensor([row.first for row in singles], device=device)
            self._is_in_order = [row.first for row in singles] == list(range(len(singles)))

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float, bias: DistanceBias | None = None) -> Tensor:
        tokens, head_dim = qkv.shape[0], cache.shape[3]
        qkv = qkv.view(tokens, -1, head_dim)
        query = qkv[:, : self._heads]
        if self._decode is not None and self._is_all_single:
            if not self._is_in_order:
                query = query.index_select(0, self._single_rows)
            output = self._decode(query, cache, scale, bias)
            if not self._is_in_order:
                output = torch.empty_like(output).index_copy_(0, self._single_rows, output)
            return output.reshape(tokens, self._heads * head_dim)
        output = qkv.new_empty(tokens, self._heads, head_dim)
        if self._decode is not None:
            decoded = self._decode(query.index_select(0, self._single_rows), cache, scale, bias)
            output.index_copy_(0, self._single_rows, decoded)
        for prefill in self._prefills:
            prefill(output, query, qkv[:, self._heads :], cache, self._head_map, scale, bias)
        return output.view(tokens, self._heads * head_dim)


class _Prefill:
    """Attention of one row with several tokens: scaled_dot_product_attention over its own context."""

    def __init__(self, row: ContextRow, view: AttentionView) -> None:
        device, window = view.device, view.window if view.is_causal else None
        self._here = slice(row.first, row.first + row.count)
        self._is_causal = view.is_causal
        context = row.keys_end(is_causal=view.is_causal)
        # A whole prompt has its keys and values in `qkv`. A later chunk reads them from the cache, and so does
        # attention that is not causal: `qkv` may then have only queries.
        is_whole = view.is_causal and context == row.count
        first_seen = 0 if window is None else max(0, context - row.count + 1 - window)
        table = view.tables[row.line]
        self._context_slots = (
            None if is_whole else TokenSlots.of_positions(table, first_seen, context, view.block_tokens)
        )
        self._own = torch.arange(row.position, row.end, device=device)[:, None]
        self._seen = torch.arange(0 if is_whole else first_seen, context, device=device)
        self._mask: Tensor | None = None
        if view.is_causal and (not is_whole or (window is not None and window < context)):
            self._mask = self._causal_mask(window, view.dtype)

    def _causal_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return 0 for each key that a token sees and -inf for all others, [tokens, keys]."""
        is_seen = self._seen <= self._own
        if window is not None:
            is_seen &= self._seen > self._own - window
        mask = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
        return mask.masked_fill_(~is_seen, float("-inf"))

    def __call__(
        self,
        output: Tensor,
        query: Tensor,
        own_kv: Tensor,
        cache: Tensor,
        head_map: Tensor | None,
        scale: float,
        bias: DistanceBias | None,
    ) -> None:
        kv = own_kv[self._here] if self._context_slots is None else self._context_slots.read(cache)
        keys, values = kv.transpose(0, 1).chunk(2)  # [kv heads, context, head_dim] each
        if head_map is not None:
            keys, values = keys.index_select(0, head_map), values.index_select(0, head_map)
        mask = self._mask
        if bias is not None:
            # float32, also beside half precision: a rounded bias would move scores of order 10 by some hundredths.
            added = bias.table[:, bias.columns(self._seen - self._own)]
            if self._is_causal:
                added += self._causal_mask(None, torch.float32) if mask is None else mask
            mask = added[None]
        attended = F.scaled_dot_product_attention(
            query[self._here].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None and self._is_causal,
            scale=scale,
        )
        output[self._here] = attended[0].transpose(0, 1)


class _GatheredDecode:
    """Attention of all one-token rows at once: gathers their visible keys and values, and computes in float32."""

    def __init__(self, rows: Sequence[ContextRow], view: AttentionView) -> None:
        ends = [row.keys_end(is_causal=view.is_causal) for row in rows]
        window = view.window if view.is_causal else None
        begins = [0 if window is None else max(0, end - window) for end in ends]
        lengths = torch.tensor([end - begin for begin, end in zip(begins, ends, strict=True)], device=view.device)
        self._row_of = torch.repeat_interleave(torch.arange(len(rows), device=view.device), lengths)
        # The first entry of each row follows the last entry of the row before it.
        behind = lengths.cumsum(0) - lengths - torch.tensor(begins, device=view.device)
        positions = torch.arange(len(self._row_of), device=view.device) - behind[self._row_of]
        lines = torch.tensor([row.line for row in rows], device=view.device)[self._row_of]
        blocks = view.tables[lines, positions // view.block_tokens].long()
        self._places = TokenSlots(blocks, positions % view.block_tokens)
        self._head_map = torch.tensor(view.kv_of_query, device=view.device)
        self._distances = positions - torch.tensor([row.position for row in rows], device=view.device)[self._row_of]

    def __call__(self, query: Tensor, cache: Tensor, scale: float, bias: DistanceBias | None) -> Tensor:
        rows, row_of = query.shape[0], self._row_of
        keys, values = self._places.read(cache).float().chunk(2, dim=1)
        keys, values = keys.index_select(1, self._head_map), values.index_select(1, self._head_map)  # [S, heads, dim]
        scores = (query.float().index_select(0, row_of) * keys).sum(-1) * scale  # [S, heads]
        if bias is not None:
            scores += bias.table[:, bias.columns(self._distances)].T
        index = row_of[:, None].expand_as(scores)
        largest = scores.new_full((rows, scores.shape[1]), float("-inf"))
        largest.scatter_reduce_(0, index, scores, "amax")
        weights = (scores - largest.index_select(0, row_of)).exp_()
        sums = torch.zeros_like(largest).index_add_(0, row_of, weights)
        output = query.new_zeros(query.shape, dtype=torch.float32)
        output.index_add_(0, row_of, weights[:, :, None] * values)
        return (output / sums[:, :, None]).to(query.dtype)
