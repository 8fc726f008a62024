"""The scales of random weights in models for measuring.

With a library's usual random weights, a model repeats one token for every prompt, so comparing outputs would prove
nothing. Here a matrix makes its input `GAIN` times as large, and embeddings are small compared with what the layers
add, so every output depends on its whole prompt. With a much larger gain, rounding errors would grow from layer to
layer until two correct answers differ.
"""

GAIN = 1.4
EMBEDDING_DEVIATION = 0.06
