"""Initial weights with which a T5 nearly copies its source, so that the training need not find out how.

A Transformer copies by looking for the place in the source whose previous tokens are the last tokens of the target: an
induction head (Olsson et al. 2022, In-context Learning and Induction Heads). A small model finds it after thousands of
steps. Here the first weights hold it, with noise, and all of them are trained.
"""

import math

import torch
from tokenizers import Tokenizer
from transformers import T5ForConditionalGeneration

from orca.cli.small_model.cased_tokenizer import SPACE

BIAS = 8.0  # of the relative positions that a head attends to; e^8 outweighs a source of 60 words
# The heads that see more than the last token: how many tokens back the nearest one is, and by how much the bias falls
# with each token further back.
RECENT = ((1, 8.0), (2, 1.0), (3, 0.5))
RECENT_WEIGHT = 0.7  # of these tokens in a key, against the last one
QUIET = 0.2  # factor of all other outputs, which would drown the copy at first
SHARPNESS = 0.5  # factor of the queries and keys that look for the place
LOUDNESS = 3.0  # factor of the token that is copied, against the last token of the target


@torch.no_grad()
def begin_as_copier(model: T5ForConditionalGeneration, embeddings: torch.Tensor) -> None:
    """Write an induction head into the first attention layers of both stacks.

    The first half of the hidden dimensions holds the token itself, the other half the key of its place. Half of the
    heads write the last token into the key, the other half the tokens before it, which tell apart the places after the
    same word. The last token is the previous one in the encoder, and the token itself in the decoder. Half of the heads
    of cross attention compare keys and copy the token. The other half stays as it was drawn.

    Args:
        model: as it was drawn; its number of heads is even, and d_model = heads x d_kv.
        embeddings: of all tokens, [vocabulary, d_model / 2].
    """
    config = model.config
    heads, width, half = config.num_heads, config.d_kv, config.d_model // 2
    if heads % 2 or heads * width != config.d_model:
        raise ValueError(f"a copier needs an even number of heads and d_model = heads x d_kv, not {heads} x {width}")
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if name.endswith((".o.weight", ".wo.weight")):
            weight.mul_(QUIET)
    weights["shared.weight"].zero_()
    weights["shared.weight"][:, :half] = embeddings

    recent = [RECENT[head % len(RECENT)] for head in range(heads // 2)]
    # An average of tokens is shorter than one token: its terms point in all directions.
    lengths = torch.tensor([math.sqrt(math.tanh(slope / 2)) for _, slope in recent]).repeat_interleave(width)
    read = torch.cat([orthogonal(half), orthogonal(half)])
    written = torch.cat([torch.eye(half), RECENT_WEIGHT * orthogonal(half) / lengths], dim=1)
    for stack, last in (("encoder", 1), ("decoder", 0)):
        attention = f"{stack}.block.0.layer.0.SelfAttention"
        weights[f"{attention}.v.weight"].zero_()
        weights[f"{attention}.v.weight"][:, :half] = read
        weights[f"{attention}.o.weight"][half:] = written
        # The bucket of a token that is a few places back is its distance, in both stacks.
        bias = weights[f"{attention}.relative_attention_bias.weight"]
        bias[last, : heads // 2] = BIAS
        for head, (nearest, slope) in enumerate(recent, heads // 2):
            for distance in range(nearest, 7):
                bias[last + distance, head] = max(0.0, BIAS - slope * (distance - nearest))
    cross = "decoder.block.0.layer.1.EncDecAttention"
    for letter, columns, factor in (
        ("q", slice(half, None), SHARPNESS),
        ("k", slice(half, None), SHARPNESS),
        ("v", slice(half), 1.0),
    ):
        weights[f"{cross}.{letter}.weight"][:half] = 0
        weights[f"{cross}.{letter}.weight"][:half, columns] = factor * torch.eye(half)
    weights[f"{cross}.o.weight"][:, :half] = 0
    weights[f"{cross}.o.weight"][:half, :half] = LOUDNESS * torch.eye(half)


def first_embeddings(tokenizer: Tokenizer, width: int) -> torch.Tensor:
    """Return embeddings [vocabulary, width] to begin with, in which a piece is close to itself with a capital or space.

    An embedding is the sum of a random vector of the letters, one of the capital, one of the space, and some noise of
    the token's own. The model then learns once to copy a piece, and once to add a capital.
    """
    vocabulary = tokenizer.get_vocab()
    rows = torch.randn(len(vocabulary), width)
    noise = torch.randn(len(vocabulary), width) * 0.3
    capital, space = torch.randn(2, width) * 0.5
    embeddings = noise
    for token, place in vocabulary.items():
        letters = token.removeprefix(SPACE)
        small = letters[:1].lower() + letters[1:]
        embeddings[place] += rows[vocabulary.get(small, place)]
        embeddings[place] += capital * (letters != small) + space * (letters == token)
    return embeddings


def orthogonal(width: int) -> torch.Tensor:
    """Return a random orthogonal matrix [width, width]."""
    matrix: torch.Tensor = torch.linalg.qr(torch.randn(width, width)).Q
    return matrix
