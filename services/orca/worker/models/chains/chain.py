"""The model that checks the server. It is no language model: its tokens are a hash of everything in the KV caches.

A server may mix up two requests, skip a position, read a neighbour's or a stale KV block, or restart a request from the
wrong tokens. With a language model it still writes plausible text. With this model every token after the mistake
changes. The right tokens follow from prompt, seed and index alone by whole-number arithmetic, and
e2e/checker/oracles/chain_oracle.py computes them without a line of this package. Everything else is the path of
language models: loader, slices of ranks, paged KV cache, ragged attention with grouped heads, all-reduce,
stage-to-stage activations, sampler.

Let i be a position, l a layer, c a channel of the KV heads and d a channel of the query heads. The channel of the KV
heads that d's head reads is g(d). The weights are keep, mix and the salts. With p = 2^31 - 1, fold(x) = x^5 mod p maps
the numbers below p to each other one to one (5 and p - 1 share no factor), in no visible order:

    embedding   state[i, 0]    = fold(fold(token[i] + salt) + i)
    layer       kept[i, l, c]  = fold(state[i, l] + keep[l, c]) mod 256        the values in the KV cache
                seen[i, l, d]  = kept[0, l, g(d)] + ... + kept[i, l, g(d)]     attention
                state[i, l+1]  = fold(state[i, l] + sum over d of mix[l, d] * seen[i, l, d])
    head        first[i]       = fold(state[i, layers] + salt) mod (vocab - 15)
                logits[i, t]   = 0 for first[i] <= t < first[i] + 16, else -10,000

Queries and keys are ones, so all scores are equal and attention yields the mean of the values; times the number of
positions and rounded it is their sum. A key that is not one (a slot that nobody wrote) shifts the weights and spoils
the sum. Sixteen tokens are exactly equally likely, and the others have weight exp(-10,000) = 0. So the cumulated
weights of the sampler are 0, 1, ... 16: every temperature above 0 chooses the same token, without rounding, and
temperature 0 takes the first of the equal logits.

Numbers travel between layers, stages and ranks in float32, which holds whole numbers up to 2^24, so a state travels as
two halves. A sum of `seen` is at most 4096 x 255 < 2^20; there, the mean's rounding error, multiplied back, was 2^-4.
"""

import torch
from torch import Tensor

from orca.kernels.contract.reference import KvWrite
from orca.kernels.device import kernels_of
from orca.worker.models.blocks import StepContext, feature_span
from orca.worker.models.chains.chain_config import ChainConfig, Seq2SeqChainConfig
from orca.worker.models.chains.whole_numbers import (
    WholeHead,
    fold,
    halves,
    joined,
    kept_hashes,
    sum_over_ranks,
    whole_numbers,
)
from orca.worker.models.family import FamilyParts
from orca.worker.models.weights import RankWeights
from orca.worker.parallel.shard import heads_of


class ChainEmbedding:
    """Starts each position's state from its token and its place."""

    only_kernels = False
    table = None  # no matrix, which the head could share

    def __init__(self, weights: RankWeights, config: ChainConfig, prefix: str) -> None:
        del config
        self._salt = whole_numbers(weights, f"{prefix}embed.salt", 1)

    def __call__(self, ids: Tensor, step: StepContext) -> Tensor:
        return halves(fold(fold(ids + self._salt) + step.positions))


class ChainLayer:
    """Layer `number` of the model, `index` in its stage: keeps a hash of each state, and mixes in all kept hashes."""

    only_kernels = False

    def __init__(self, weights: RankWeights, config: ChainConfig, prefix: str, *, number: int, index: int) -> None:
        here = f"{prefix}layers.{number}."
        heads, dim = heads_of(weights.shard, config.num_heads, config.num_kv_heads), config.head_dim
        self._keep = whole_numbers(weights, f"{here}keep", config.num_kv_heads * dim, feature_span(heads.kv, dim))
        self._mix = whole_numbers(weights, f"{here}mix", config.num_heads * dim, feature_span(heads.query, dim))
        self._num_query, self._num_kv, self._head_dim = heads.num_query, heads.num_kv, dim
        self._index = index

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        state = joined(x)
        qkv = self._keep_hashes(state, step)
        attention, positions = step.attention, step.positions
        if (wanted := step.wanted_rows(self._index)) is not None:
            qkv, state, positions = (each.index_select(0, wanted.rows) for each in (qkv, state, positions))
            attention = wanted.attention
        means = attention[None](qkv, step.caches[self._index], 1.0)
        seen = (means * (positions + 1)[:, None]).round().long()
        # A rank has seen its own heads only. It does not fold: the sum of the ranks' parts is the sum over all heads.
        part = (seen * self._mix).sum(dim=-1)
        return halves(fold(state + sum_over_ranks(part, step)))

    def keep(self, x: Tensor, step: StepContext) -> None:
        self._keep_hashes(joined(x), step)

    def _keep_hashes(self, state: Tensor, step: StepContext) -> Tensor:
        """Put the hashes of state [tokens] into the cache.

        Returns: the hashes as values, beside queries and keys.
        """
        kept = kept_hashes(state, self._keep)
        qkv = torch.ones(len(state), self._num_query + 2 * self._num_kv, self._head_dim, device=state.device)
        qkv[:, -self._num_kv :] = kept.view(-1, self._num_kv, self._head_dim)
        kernels_of(qkv.device).write_kv(qkv, KvWrite(step.caches[self._index], step.slots, None))
        return qkv


class ChainHead:
    """Equal logits for the 16 tokens that the last state chooses. It ignores channels behind the halves of a state."""

    only_kernels = False

    def __init__(self, weights: RankWeights, config: ChainConfig | Seq2SeqChainConfig, prefix: str, tied: None) -> None:
        del prefix, tied
        self._head = WholeHead(weights, config.vocab_size)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """Map [rows, hidden] to [rows, vocab] in float32."""
        return self._head.logits(joined(x[:, :2]), step)


FAMILY = FamilyParts(
    embedding=ChainEmbedding,
    layer=ChainLayer,
    head=ChainHead,
    prefixes=("",),
    probe="embed.salt",
    layers="layers",
)
