"""How large the random weights of a model for measuring are.

Random weights as a library initialises them make a model that repeats one token whatever the prompt, so comparing its
outputs would prove nothing. Here a matrix makes its input `GAIN` times as large and embeddings are small beside what
the layers add, so every output depends on its whole prompt. A much larger gain would let rounding errors grow from
layer to layer until two right answers differ.
"""

GAIN = 1.4
EMBEDDING_DEVIATION = 0.06
