"""Initial weights with which a T5 nearly copies its source, so that the training need not find out how.

A Transformer copies by looking for the place in the source whose previous tokens are the last tokens of the target: an
induction head (Olsson et al. 2022, In-context Learning and Induction Heads). A small model finds it after thousands of
steps. Here the first weights hold it, with noise, and all of them are trained.
"""

import torch
from tokenizers import Tokenizer
from transformers import T5ForConditionalGeneration

from orca.cli.small_model.cased_tokenizer import SPACE

BIAS = 8.0  # of the relative position that a head attends to; e^8 outweighs a source of 60 words
QUIET = 0.2  # factor of all other outputs, which would drown the copy at first
SHARPNESS = 0.5  # factor of the queries and keys that look for the place
LOUDNESS = 3.0  # factor of the token that is copied, against the last token of the target


@torch.no_grad()
def begin_as_copier(model: T5ForConditionalGeneration, embeddings: torch.Tensor) -> None:
    """Write an induction head into the first attention layers of both stacks.

    The first half of the hidden dimensions holds the token itself, the other half its key: the sum of two tokens, each
    rotated in its own way. In the encoder these are the two tokens before it, in the decoder itself and the one
    before. Half of the heads of cross attention compare keys and copy the token. The other half stays as it was drawn.

    Args:
        model: as it was drawn; its number of heads is even, and d_model = heads x d_kv.
        embeddings: of all tokens, [vocabulary, d_model / 2].
    """
    config = model.config
    heads, width, half = config.num_heads, config.d_kv, config.d_model // 2
    if heads % 2 or heads * width != config.d_model:
        raise ValueError(f"a copier needs an even number of heads and d_model = heads x d_kv, not {heads} x {width}")
    for name, weight in model.named_parameters():
        if name.endswith((".o.weight", ".wo.weight")):
            weight.mul_(QUIET)
    model.shared.weight.zero_()
    model.shared.weight[:, :half] = embeddings

    rotations = torch.cat([orthogonal(half), orthogonal(half)])
    for block, distances in ((model.encoder.block[0], (1, 2)), (model.decoder.block[0], (0, 1))):
        attention = block.layer[0].SelfAttention
        attention.v.weight.zero_()
        attention.v.weight[:, :half] = rotations
        attention.o.weight[half:] = torch.eye(half).repeat(1, 2)
        # The bucket of a token that is a few places before is its distance, in both stacks.
        attention.relative_attention_bias.weight[distances[0], : heads // 2] = BIAS
        attention.relative_attention_bias.weight[distances[1], heads // 2 :] = BIAS
    cross = model.decoder.block[0].layer[1].EncDecAttention
    for weight, columns, factor in (
        (cross.q.weight, slice(half, None), SHARPNESS),
        (cross.k.weight, slice(half, None), SHARPNESS),
        (cross.v.weight, slice(half), 1.0),
    ):
        weight[:half] = 0
        weight[:half, columns] = factor * torch.eye(half)
    cross.o.weight[:, :half] = 0
    cross.o.weight[:half, :half] = LOUDNESS * torch.eye(half)


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
        embeddings[place] += capital * (letters != small) + space * (letters != token)
    return embeddings


def orthogonal(width: int) -> torch.Tensor:
    """Return a random orthogonal matrix [width, width]."""
    return torch.linalg.qr(torch.randn(width, width)).Q
