"""The arguments of kernels, and a reference of ragged paged attention in plain PyTorch, request by request. Every
faster version is tested against the reference.

    out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, g(h)] + bias[h, j - i]) v[j, g(h)]

The sum runs over the positions j that token t at position i sees: those of its own request with j <= i. With a sliding
window these are only the last `window` of them, including its own. The KV head of query head h is
g(h) = kv_of_query[h].

Attention that is not causal sees as many keys as its row says. The encoder sees the whole source; cross attention of a
decoder sees the keys of another block table. Only some models have a bias (T5).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from orca.kernels.contract.activation import Activation
from orca.kernels.contract.paged import TokenSlots


@dataclass(frozen=True, slots=True)
class ContextRow:
    """A request's tokens in a step: flat rows first .. first + count - 1, the last tokens of its context."""

    first: int
    count: int
    position: int  # position of the first token
    line: int  # line of the request in `AttentionView.tables`
    keys: int | None = None  # if attention is not causal, its tokens see positions 0 .. keys - 1; at least 1

    @property
    def end(self) -> int:
        """Length of the context, these tokens included."""
        return self.position + self.count

    def keys_end(self, *, is_causal: bool) -> int:
        """Return the number of positions that its last token sees, if there is no sliding window."""
        if is_causal:
            return self.end
        assert self.keys is not None
        assert self.keys > 0, "a softmax needs one key"
        return self.keys


@dataclass(frozen=True, slots=True)
class NormParameters:
    """The parameters of a norm of rows, which is computed in float32 and rounded once, to x's dtype:

    RMSNorm    x / sqrt(mean(x^2) + eps) * weight
    LayerNorm  (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    """

    weight: Tensor  # [inputs]
    eps: float
    bias: Tensor | None = None  # [inputs] for a LayerNorm; None for an RMSNorm


@dataclass(frozen=True, slots=True)
class KvWrite:
    """The cache and slots for a step's keys and values, and the changes of keys and queries before the write.

    See device.Kernels.write_kv.
    """

    cache: Tensor  # [blocks, 2 x kv heads, block_tokens, head_dim]
    slots: Tensor  # [tokens] int64
    rotations: Tensor | None  # [tokens, 1, head_dim / 2] complex64, for pairs of neighbouring dimensions (RoPE)
    head_norm: NormParameters | None = None  # RMSNorm of each head, weights [query heads + kv heads, head_dim] (Qwen3)

    @property
    def changes_queries(self) -> bool:
        return self.rotations is not None or self.head_norm is not None


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """A number added to each scaled score. It depends on the query head and on the distance of key and query (T5).

    The column for the distance j - i of key j and query i is `zero + j - i`, clamped to the columns that there are.
    """

    table: Tensor  # [query heads of this rank, distances] float32, contiguous
    zero: int  # column of distance 0

    def columns(self, distances: Tensor) -> Tensor:
        """Return the column for each distance j - i of key j and query i."""
        return (distances + self.zero).clamp_(0, self.table.shape[1] - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionView:
    """A rank's view of its keys and values, the same for all rows of a step."""

    kv_of_query: Sequence[int]  # for each query head of this rank, the KV head (of this rank) that it reads; ascending
    kv_heads: int  # of this rank
    head_dim: int
    tables: Tensor  # [lines, blocks] int32: the blocks of each request; positions fill them in order (paged.py)
    block_tokens: int
    window: int | None  # number of positions that a token sees, itself included; None: all positions up to its own
    dtype: torch.dtype
    device: torch.device
    is_causal: bool = True  # False: each token sees the first `ContextRow.keys` positions, without a window
    is_encoder: bool = False  # not causal, and the rows are whole sources; a kernel may choose another order of sums


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a rank's model that decide which kernels its steps call, and how these are compiled.

    Encoder and decoder have sizes of their own.
    """

    dtype: torch.dtype  # of activations and cache
    weight_dtype: torch.dtype  # of the weight matrices
    table_dtype: torch.dtype  # of the token embeddings
    device: torch.device
    hidden: int
    heads: int  # query heads of this rank
    kv_heads: int
    head_dim: int
    kv_of_query: Sequence[int]  # as in AttentionView
    windows: Sequence[int | None]  # sliding windows of the layers
    is_causal: bool = True  # False for an encoder
    has_cross_attention: bool = False
    has_distance_bias: bool = False  # of self attention
    has_rotary: bool = False  # RoPE
    has_head_norm: bool = False
    is_layer_norm: bool = False
    intermediate: int = 0  # of this rank; 0 without an MLP
    activation: Activation | None = None
    is_gated: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    block_tokens: int = 16
    vocab: int = 0  # vocabulary of the head; 0 on a rank that draws no tokens


class RaggedAttention(Protocol):
    """The geometry of one step under one sliding window: built once, then applied in each layer."""

    def __call__(self, qkv: Tensor, cache: Tensor, scale: float, bias: DistanceBias | None = None) -> Tensor:
        """Compute the attention of the step's tokens.

        Args:
            qkv: [tokens, query heads + 2 x kv heads, head_dim], contiguous: the step's own queries, keys and values.
                In cross attention [tokens, query heads x head_dim]: all keys are in the cache.
            cache: [blocks, 2 x kv heads, block_tokens, head_dim] (paged.py); it contains the step's own keys and
                values.
            scale: factor of the scores.
            bias: None if the model has none.
        Returns: [tokens, query heads x head_dim].
        """
        ...


def attend_reference(
    query: Tensor,
    cache: Tensor,
    rows: Sequence[ContextRow],
    tables: Tensor,
    kv_of_query: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    is_causal: bool = True,
    bias: DistanceBias | None = None,
) -> Tensor:
    """Compute the attention of all rows of a step, one request at a time.

    Args:
        query: [tokens, query heads, head_dim].
        cache: [blocks, 2 x kv heads, block_tokens, head_dim] (paged.py); it contains the step's own keys and values.
        rows: the requests of the step; together they cover each flat token once.
        tables: [lines, blocks] int32, the blocks of the requests.
        kv_of_query: for each query head the KV head that it reads.
        scale: factor of the scores.
        window: number of positions that a token sees, itself included; None: all positions up to its own.
        is_causal: otherwise each token sees the first `ContextRow.keys` positions of its line.
        bias: of distances, added to the scaled scores.
    Returns: [tokens, query heads, head_dim], in the dtype of `query`, accumulated in float32.
    """
    output = torch.empty_like(query)
    head_map = torch.tensor(kv_of_query, device=query.device)
    for row in rows:
        end = row.keys_end(is_causal=is_causal)
        context = TokenSlots.of_positions(tables[row.line], 0, end, cache.shape[2]).read(cache)
        keys, values = context.float().chunk(2, dim=1)  # [positions, kv heads, head_dim] each
        here = slice(row.first, row.first + row.count)
        scores = torch.einsum("thd,jhd->htj", query[here].float(), keys[:, head_map]) * scale
        position = torch.arange(end, device=query.device)
        own = torch.arange(row.position, row.end, device=query.device)[:, None]  # position of each of the row's tokens
        if bias is not None:
            scores += bias.table[:, bias.columns(position - own)]
        if is_causal:
            is_hidden = position > own
            if window is not None:
                is_hidden |= position <= own - window
            scores.masked_fill_(is_hidden, float("-inf"))
        weights = scores.softmax(dim=-1)
        output[here] = torch.einsum("htj,jhd->thd", weights, values[:, head_map]).to(query.dtype)
    return output
