"""The scales of random weights in models for measuring.

With a library's usual random weights, a model repeats one token for every prompt, so comparing outputs would prove
nothing. Here a matrix makes its input `GAIN` times as large, and embeddings are small compared with what the layers
add, so every output depends on its whole prompt. With a much larger gain, rounding errors would grow from layer to
layer until two correct answers differ.
"""

import math

import torch

GAIN = 1.4
EMBEDDING_DEVIATION = 0.06
BIAS_DEVIATION = 0.02


def random_matrix(rows: int, columns: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Return a random matrix of a layer. Args: inputs: of the layer: one of the two sizes."""
    return torch.randn(rows, columns, generator=generator).mul_(GAIN / math.sqrt(inputs))


def small_numbers(*size: int, generator: torch.Generator, deviation: float = EMBEDDING_DEVIATION) -> torch.Tensor:
    """Return random numbers as embeddings have them."""
    return torch.randn(*size, generator=generator) * deviation
