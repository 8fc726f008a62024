"""Computes the output of a chain model from prompt, seed and index alone, in whole numbers, without the server's code.

The oracle has the running sums that the stages must find in their KV caches, and appends one token at a time. Let i be
a position, l a layer, c a channel of the KV heads, and d a channel of the query heads. Let g(d) be the channel of c
that its head reads, and fold(x) = x^5 mod p with p = 2^31 - 1. The weights of the model are keep, mix and the salts:

    state[i, 0]    = fold(fold(token[i] + embedding_salt) + i)
    kept[i, l, c]  = fold(state[i, l] + keep[l, c]) mod 256
    seen[i, l, d]  = kept[0, l, g(d)] + ... + kept[i, l, g(d)]
    state[i, l+1]  = fold(state[i, l] + sum over d of mix[l, d] * seen[i, l, d])
    first[i]       = fold(state[i, layers] + head_salt) mod (vocab - 15)

The token after position i is one of the 16 tokens from first[i] on, all equally likely. With temperature 0 it is the
first of them. With any temperature above 0 it is number floor(16 u), where u in [0, 1) is the 53-bit number that the
sampler draws for (seed, index): Philox4x32-10 with the seed's two words as key and the index as counter. The sampler
takes the first token with a cumulative probability above u. Sixteenths are exact in floating point, so that this is the
same token with any rounding. A grammar (digit_pattern.py) leaves n of the 16 tokens, and the token is number floor(n u)
of these.
"""

from collections.abc import Callable, Sequence

from checker.clients.digit_pattern import DigitPattern
from checker.oracles.chain_model import ChainModel

PRIME = 2**31 - 1
CHOICES = 16
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def expected_tokens(
    model: ChainModel,
    prompt: Sequence[int],
    count: int,
    *,
    seed: int,
    temperature: float,
    ignore_eos: bool = False,
    pattern: DigitPattern | None = None,
) -> list[int]:
    """Return the output of a request without penalties, logit_bias and min_tokens.

    top_k (16 or more), top_p and min_p remove no token, because they keep or remove equal logits together.

    Args:
        prompt: one token or more.
        count: most tokens to generate.
        seed: of the choice, from 0 to 2^63 - 1: choice k of a call has (seed of the call + k) mod 2^63.
        temperature: 0 is greedy; all others draw in the same way.
        ignore_eos: continue after the model's EOS.
        pattern: the grammar of the output.
    Returns: `count` tokens, or fewer that end in EOS.
    """
    eos, append = None if ignore_eos else model.eos_token_id, _Context(model).append
    return drawn_tokens(append, prompt, count, seed=seed, temperature=temperature, eos=eos, pattern=pattern)


def drawn_tokens(
    append: Callable[[int], int],
    beginning: Sequence[int],
    count: int,
    *,
    seed: int,
    temperature: float,
    eos: int | None,
    pattern: DigitPattern | None = None,
) -> list[int]:
    """Return the output after a beginning.

    Args:
        append: adds a token to the context, and returns the first of the possible next tokens.
        beginning: one token or more.
        eos: token that ends the output; None: no token does.
        pattern: the grammar of the output, with a model that has an EOS.
    """
    for token in beginning:
        first = append(token)
    output: list[int] = []
    for index in range(count):
        candidates: Sequence[int] = range(first, first + CHOICES)
        if pattern is not None:
            assert eos is not None
            candidates = pattern.candidates(index, candidates, eos)
        token = candidates[drawn_index(seed, index, len(candidates)) if temperature > 0 else 0]
        output.append(token)
        if token == eos:
            break
        first = append(token)
    return output


def drawn_index(seed: int, index: int, choices: int = CHOICES) -> int:
    """Return the number, from 0, of the token that the sampler draws from so many equally likely ones."""
    words = philox((index & _LOW, index >> 32, 0, 0), (seed & _LOW, seed >> 32))
    bits = (words[0] << 32 | words[1]) >> 11  # u = bits / 2^53
    return bits * choices >> 53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Compute ten rounds of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = product1 >> 32 ^ c1 ^ k0, product1 & _LOW, product0 >> 32 ^ c3 ^ k1, product0 & _LOW
        k0, k1 = k0 + _KEY_STEPS[0] & _LOW, k1 + _KEY_STEPS[1] & _LOW
    return c0, c1, c2, c3


class _Context:
    """A request's tokens so far, as the sums over the numbers that every layer keeps of them."""

    def __init__(self, model: ChainModel) -> None:
        self._model = model
        self._length = 0
        self._sums = [[0] * len(layer.keep) for layer in model.layers]

    def append(self, token: int) -> int:
        """Add a token. Returns: the first of the possible next tokens."""
        model = self._model
        if not 0 <= token < model.vocab_size:
            raise ValueError(f"token {token} is not one of {model.vocab_size}")
        state = start_state(token, model.embedding_salt, self._length)
        for layer, sums in zip(model.layers, self._sums, strict=True):
            add_kept(layer.keep, state, sums)
            state = fold(state + mixed(layer.mix, sums, model.heads // model.kv_heads, model.head_dim))
        self._length += 1
        return first_token(state, model.head_salt, model.vocab_size)


def start_state(token: int, salt: int, position: int) -> int:
    """Return the state of a position before the first layer."""
    return fold(fold(token + salt) + position)


def add_kept(keep: Sequence[int], state: int, sums: list[int]) -> None:
    """Add the numbers that a layer keeps of a state to its sums, one for each channel of the KV heads."""
    for channel, number in enumerate(keep):
        sums[channel] += fold(state + number) % 256


def mixed(mix: Sequence[int], sums: Sequence[int], sharing: int, channels: int) -> int:
    """Return the sum over all query channels: each multiplies the sum of the KV channel that it reads.

    Args:
        sharing: number of query heads that read one KV head.
        channels: of a head.
    """
    total = 0
    for channel, multiplier in enumerate(mix):
        head, place = divmod(channel, channels)
        total += multiplier * sums[head // sharing * channels + place]
    return total


def first_token(state: int, salt: int, vocab_size: int) -> int:
    """Return the first of the equally likely next tokens, from the state after the last layer."""
    return fold(state + salt) % (vocab_size - CHOICES + 1)


def fold(number: int) -> int:
    """Return x^5 mod p."""
    return pow(number, 5, PRIME)
