"""What layers need beside matrix products (device.py), in PyTorch's own operations, on any device.

Attention computes all increment-phase rows (one token each) together: their keys and values are gathered and laid end
to end, without padding and without a loop over requests. Initiation-phase rows run one by one, since each is a large
operation of its own.
"""

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.paged import TokenSlots
from orca.kernels.contract.reference import AttentionView, ContextRow, KvWrite, ModelSizes, NormParameters


class PlainKernels:
    """Kernels of any device."""

    def prepare(self, sizes: ModelSizes) -> bool:  # noqa: ARG002
        """PyTorch's operations are compiled."""
        return False

    def attention(self, rows: Sequence[ContextRow], seen: AttentionView) -> "PlainAttention":
        return PlainAttention(rows, seen)

    def deferred(self) -> AbstractContextManager[None]:
        return nullcontext()

    def recorder(self, device: torch.device) -> None:
        """PyTorch's operations run when they are called."""

    def increment(self, at: int) -> None:
        ctypes.c_int64.from_address(at).value += 1

    def sampler(self, vocab: int, device: torch.device) -> None:
        """The host draws."""

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def embed(self, table: Tensor, ids: Tensor, places: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Tensor:
        embedded = table.index_select(0, ids).to(dtype)
        return embedded if places is None else embedded.add_(places.index_select(0, positions))

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(dim=-1)

    def write_kv(self, qkv: Tensor, kept: KvWrite, bias: Tensor | None = None) -> None:
        if bias is not None:
            qkv += bias.view(qkv.shape[1:])
        lines = kept.cache.shape[1]
        turned = qkv[:, : qkv.shape[1] - lines // 2]
        if kept.head_norm is not None:
            normed = F.rms_norm(turned, (qkv.shape[2],), None, kept.head_norm.eps)
            torch.mul(normed, kept.head_norm.weight, out=turned)
        if kept.turns is not None:
            pairs = turned.view(*turned.shape[:-1], -1, 2)
            if qkv.dtype == torch.float32:
                torch.view_as_complex(pairs).mul_(kept.turns)
            else:
                pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(kept.turns)))
        TokenSlots.of(kept.slots, kept.cache.shape[2]).write(kept.cache, qkv[:, -lines:])

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

    def gated_silu(self, gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
        gate, up = (gate_up if bias is None else gate_up + bias).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class PlainAttention:
    """The geometry of one step. Args: as of device.Kernels.attention."""

    def __init__(self, rows: Sequence[ContextRow], seen: AttentionView) -> None:
        device = seen.device
        self._heads = len(seen.kv_of_query)
        # One KV head per query head in order needs no map.
        is_plain = list(seen.kv_of_query) == list(range(seen.kv_heads))
        self._head_map = None if is_plain else torch.tensor(seen.kv_of_query, device=device)
        singles = [row for row in rows if row.count == 1]
        self._is_all_single = len(singles) == len(rows)
        self._prefills = [_Prefill(row, seen) for row in rows if row.count > 1]
        self._decode: _GatheredDecode | None = None
        if singles:
            self._decode = _GatheredDecode(singles, seen)
            self._single_rows = torch.tensor([row.first for row in singles], device=device)
            self._is_in_order = [row.first for row in singles] == list(range(len(singles)))

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float) -> Tensor:
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

    def __init__(self, row: ContextRow, seen: AttentionView) -> None:
        device, window = seen.device, seen.window
        self._here = slice(row.first, row.first + row.count)
        context = row.end
        is_whole = context == row.count
        first_seen = 0 if window is None else max(0, context - row.count + 1 - window)
        # A whole prompt has its keys and values at hand; only a later chunk reads them from the cache.
        table = seen.tables[row.line]
        self._seen = None if is_whole else TokenSlots.of_positions(table, first_seen, context, seen.block_tokens)
        self._mask: Tensor | None = None
        if not is_whole or (window is not None and window < context):
            first_key = 0 if is_whole else first_seen
            own = torch.arange(context - row.count, context, device=device)[:, None]
            key = torch.arange(first_key, context, device=device)
            is_seen = key <= own
            if window is not None:
                is_seen &= key > own - window
            self._mask = torch.zeros(is_seen.shape, dtype=seen.dtype, device=device).masked_fill_(
                ~is_seen, float("-inf")
            )

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


class _GatheredDecode:
    """All one-token rows at once: gathers the seen keys and values, laid end to end, computes in float32."""

    def __init__(self, rows: Sequence[ContextRow], seen: AttentionView) -> None:
        begins = [0 if seen.window is None else max(0, row.end - seen.window) for row in rows]
        lengths = torch.tensor([row.end - begin for row, begin in zip(rows, begins, strict=True)], device=seen.device)
        self._row_of = torch.repeat_interleave(torch.arange(len(rows), device=seen.device), lengths)
        # Behind the last entry of each row comes the next row's first.
        behind = lengths.cumsum(0) - lengths - torch.tensor(begins, device=seen.device)
        positions = torch.arange(len(self._row_of), device=seen.device) - behind[self._row_of]
        lines = torch.tensor([row.line for row in rows], device=seen.device)[self._row_of]
        blocks = seen.tables[lines, positions // seen.block_tokens].long()
        self._places = TokenSlots(blocks, positions % seen.block_tokens)
        self._head_map = torch.tensor(seen.kv_of_query, device=seen.device)

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
