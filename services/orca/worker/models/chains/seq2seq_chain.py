"""The encoder-decoder model that checks the server: its tokens are a hash of all keys and values that the stages kept.

chain.py explains the purpose and the arithmetic. This model takes the path of encoder-decoder models. Its encoder
layers use the workspace, the encoder output travels with its step, and a second block table has the keys and values of
cross attention. The module checker.oracles.seq2seq_chain_oracle of e2e/ computes the right tokens without a line of
this package.

Let j be a position of the source, i one of the target, and l a layer. Let c be a channel of the KV heads, and d a
channel of the query heads, which reads channel g(d). Both stacks have weights and numbers of heads of their own:

    source      state[j, 0]    = fold(fold(token[j] + encoder salt) + j)
    encoder     kept[j, l, c]  = fold(state[j, l] + keep[l, c]) mod 256       in the workspace
                seen[l, d]     = sum over all j of kept[j, l, g(d)]
                state[j, l+1]  = fold(state[j, l] + sum over d of mix[l, d] * seen[l, d])
    target      state[i, 0]    = fold(fold(token[i] + decoder salt) + i)
    decoder     kept[i, l, c]  = fold(state[i, l] + keep[l, c]) mod 256       self KV
                cross[j, l, c] = fold(memory[j] + cross_keep[l, c]) mod 256   cross KV; memory is the encoder output
                seen[i, l, d]  = kept[0, l, g(d)] + ... + kept[i, l, g(d)]
                read[l, d]     = sum over all j of cross[j, l, g(d)]
                state[i, l+1]  = fold(state[i, l] + sum over d of mix[l, d] * seen[i, l, d]
                                                  + sum over d of cross_mix[l, d] * read[l, d])
    head        as in chain.py

Attention yields means. The first channel of each head is 1 at position 0 and 0 elsewhere, so its mean is 1 / n for n
positions. Each mean times n, rounded, is the sum. So a layer needs no number of positions from the step, which would
hide that attention saw fewer. The mark of position 0 is the third number of a state, and travels with it.
"""

from functools import partial

import torch
from torch import Tensor

from orca.kernels.contract.reference import KvWrite, RaggedAttention
from orca.kernels.device import kernels_of
from orca.worker.models.blocks import StepContext, feature_span
from orca.worker.models.chains.chain import ChainHead
from orca.worker.models.chains.chain_config import CHAIN_POSITIONS_MAX, Seq2SeqChainConfig
from orca.worker.models.chains.whole_numbers import (
    fold,
    halves,
    joined,
    kept_hashes,
    sum_over_ranks,
    whole_numbers,
)
from orca.worker.models.family import EncoderParts, FamilyParts
from orca.worker.models.model_shape import Stack
from orca.worker.models.weights import RankWeights
from orca.worker.parallel.shard import heads_of

_SCALE = 1.0


class _Embedding:
    """Starts the state of each position from its token and its place. Args: stack: `encoder` or `decoder`."""

    only_kernels = False

    def __init__(self, stack: str, weights: RankWeights, config: Seq2SeqChainConfig, prefix: str, table: None) -> None:
        del config, prefix, table
        self._salt = whole_numbers(weights, f"{stack}.embed.salt", 1)

    def __call__(self, ids: Tensor, step: StepContext) -> Tensor:
        states = fold(fold(ids + self._salt) + step.positions)
        return torch.cat((halves(states), (step.positions == 0).float()[:, None]), dim=1)


class _Memory:
    """The weights of one attention on one rank: what it keeps of each state, and how it mixes in what it sees.

    Args:
        here: of the names of its tensors, before `keep` and `mix`.
        kv_heads: of the whole model.
    """

    def __init__(self, weights: RankWeights, here: str, stack: Stack, kv_heads: int) -> None:
        heads, channels = heads_of(weights.shard, stack.heads, kv_heads), stack.head_dim - 1
        self._keep = whole_numbers(weights, f"{here}keep", kv_heads * channels, feature_span(heads.kv, channels))
        self._mix = whole_numbers(weights, f"{here}mix", stack.heads * channels, feature_span(heads.query, channels))
        self.num_query, self._num_kv, self.head_dim = heads.num_query, heads.num_kv, stack.head_dim

    def write(self, x: Tensor, cache: Tensor, slots: Tensor, *, queries: int) -> Tensor:
        """Put the hashes of states x [tokens, 3] into the cache.

        Args:
            queries: number of query heads to return, all ones.
        Returns: [tokens, queries + 2 x kv heads, head_dim]: queries, keys and values.
        """
        qkv = torch.ones(len(x), queries + 2 * self._num_kv, self.head_dim, device=x.device)
        values = qkv[:, -self._num_kv :]
        values[..., 0] = x[:, 2:]
        values[..., 1:] = kept_hashes(joined(x[:, :2]), self._keep).view(len(x), self._num_kv, self.head_dim - 1)
        kernels_of(x.device).write_kv(qkv, KvWrite(cache, slots, None))
        return qkv

    def read(self, attention: RaggedAttention, queries: Tensor, cache: Tensor) -> Tensor:
        """Return [tokens] int64, the mixed sums of all hashes that this rank's heads see, modulo p."""
        means = attention(queries, cache, _SCALE).view(len(queries), self.num_query, self.head_dim)
        counts = (1.0 / means[..., :1].clamp(min=0.5 / CHAIN_POSITIONS_MAX)).round()
        seen = (means[..., 1:] * counts).round().long()
        return (seen.flatten(start_dim=1) * self._mix).sum(dim=-1)


class _EncoderLayer:
    """Layer `number` of the encoder, `index` in its stage: each token mixes in the hashes of the whole source."""

    only_kernels = False

    def __init__(
        self, weights: RankWeights, config: Seq2SeqChainConfig, prefix: str, *, number: int, index: int
    ) -> None:
        self._own = _Memory(weights, f"{prefix}encoder.layers.{number}.", config.encoder, config.encoder.heads)
        self._index = index

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        own, cache = self._own, step.caches[self._index]
        qkv = own.write(x, cache, step.slots, queries=own.num_query)
        return _changed(x, own.read(step.attention[None], qkv, cache), step)


class _DecoderLayer:
    """Layer `number` of the decoder, `index` in its stage: mixes in the target so far, and the encoder output."""

    only_kernels = False

    def __init__(
        self, weights: RankWeights, config: Seq2SeqChainConfig, prefix: str, *, number: int, index: int
    ) -> None:
        here = f"{prefix}decoder.layers.{number}."
        self._own = _Memory(weights, here, config.decoder, config.num_kv_heads)
        self._cross = _Memory(weights, f"{here}cross_", config.decoder, config.num_kv_heads)
        self._index = index

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        own, cross, cache = self._own, self._cross, step.caches[self._index]
        assert step.cross is not None
        self._keep_sources(step)
        qkv = own.write(x, cache, step.slots, queries=own.num_query)
        attention, over_sources = step.attention, step.cross.attention
        if (wanted := step.wanted_rows(self._index)) is not None:
            assert wanted.cross is not None
            qkv, x = (each.index_select(0, wanted.rows) for each in (qkv, x))
            attention, over_sources = wanted.attention, wanted.cross
        queries = torch.ones(len(x), cross.num_query * cross.head_dim, device=x.device)
        part = own.read(attention[None], qkv, cache) + cross.read(over_sources, queries, cache)
        return _changed(x, part, step)

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._keep_sources(step)
        self._own.write(x, step.caches[self._index], step.slots, queries=self._own.num_query)

    def _keep_sources(self, step: StepContext) -> None:
        """Put the hashes of the encoder output of the step's sources into the cache."""
        cross = step.cross
        if cross is not None and cross.memory is not None and cross.slots is not None:
            self._cross.write(cross.memory, step.caches[self._index], cross.slots, queries=0)


def _changed(x: Tensor, part: Tensor, step: StepContext) -> Tensor:
    """Return the next states of x [tokens, 3]: this rank's sums and those of the other ranks are mixed in."""
    states = fold(joined(x[:, :2]) + sum_over_ranks(part, step))
    return torch.cat((halves(states), x[:, 2:]), dim=1)


FAMILY = FamilyParts(
    embedding=partial(_Embedding, "decoder"),
    layer=_DecoderLayer,
    head=ChainHead,
    prefixes=("",),
    probe="decoder.embed.salt",
    layers="decoder.layers",
    encoder=EncoderParts(
        table=lambda *_: None,
        embedding=partial(_Embedding, "encoder"),
        layer=_EncoderLayer,
        layers="encoder.layers",
        norm=lambda *_: None,
    ),
)
