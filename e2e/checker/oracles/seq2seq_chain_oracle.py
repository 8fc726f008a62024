"""Computes the output of an encoder-decoder chain model from source, prefix, seed and index alone, in whole numbers.

chain_oracle.py explains fold, the sums and the draws. Let j be a position of the source, i one of the target, and l a
layer. Let c be a channel of the KV heads, and d a channel of the query heads, which reads channel g(d):

    source      state[j, 0]    = fold(fold(token[j] + encoder_salt) + j)
    encoder     kept[j, l, c]  = fold(state[j, l] + keep[l, c]) mod 256
                state[j, l+1]  = fold(state[j, l] + sum over d of mix[l, d] * sum over all j of kept[j, l, g(d)])
    target      state[i, 0]    = fold(fold(token[i] + decoder_salt) + i)
    decoder     kept[i, l, c]  = fold(state[i, l] + keep[l, c]) mod 256
                cross[j, l, c] = fold(memory[j] + cross_keep[l, c]) mod 256, where memory is the encoder output
                seen[i, l, d]  = kept[0, l, g(d)] + ... + kept[i, l, g(d)]
                read[l, d]     = sum over all j of cross[j, l, g(d)]
                state[i, l+1]  = fold(state[i, l] + sum over d of mix[l, d] * seen[i, l, d]
                                                  + sum over d of cross_mix[l, d] * read[l, d])
    head        first[i]       = fold(state[i, layers] + head_salt) mod (vocab - 15)

The target is the start token, the call's prefix, and the generated tokens.
"""

from collections.abc import Sequence

from checker.clients.digit_pattern import DigitPattern
from checker.oracles.chain_oracle import add_kept, drawn_tokens, first_token, fold, mixed, start_state
from checker.oracles.seq2seq_chain_model import Seq2SeqChainModel


def expected_answer(
    model: Seq2SeqChainModel,
    source: Sequence[int],
    count: int,
    *,
    seed: int,
    temperature: float,
    prefix: Sequence[int] = (),
    ignore_eos: bool = False,
    pattern: DigitPattern | None = None,
) -> list[int]:
    """Return the output of a request without penalties, logit_bias and min_tokens.

    Args:
        source: one token or more.
        count: most tokens to generate.
        seed, temperature, ignore_eos, pattern: as in `expected_tokens`.
        prefix: the call's `decoder_prefix`.
    Returns: `count` tokens, or fewer that end in EOS.
    """
    target = _Target(model, source)
    eos = None if ignore_eos else model.eos_token_id
    beginning = model.beginning(tuple(prefix))
    return drawn_tokens(target.append, beginning, count, seed=seed, temperature=temperature, eos=eos, pattern=pattern)


class _Target:
    """A request's target so far, as the sums over the numbers that every decoder layer keeps of it and its source."""

    def __init__(self, model: Seq2SeqChainModel, source: Sequence[int]) -> None:
        self._model = model
        self._length = 0
        self._sums = [[0] * len(layer.keep) for layer in model.decoder]
        memory = _encoder_output(model, source)
        # The source is the same for all positions of the target.
        self._read = [
            _mixed_over(memory, layer.keep, layer.mix, self._sharing, model.channels) for layer in model.cross
        ]

    @property
    def _sharing(self) -> int:
        return self._model.heads // self._model.kv_heads

    def append(self, token: int) -> int:
        """Add a token. Returns: the first of the possible next tokens."""
        model = self._model
        _check_token(model, token)
        state = start_state(token, model.decoder_salt, self._length)
        for layer, sums, read in zip(model.decoder, self._sums, self._read, strict=True):
            add_kept(layer.keep, state, sums)
            state = fold(state + mixed(layer.mix, sums, self._sharing, model.channels) + read)
        self._length += 1
        return first_token(state, model.head_salt, model.vocab_size)


def _encoder_output(model: Seq2SeqChainModel, source: Sequence[int]) -> list[int]:
    states = []
    for position, token in enumerate(source):
        _check_token(model, token)
        states.append(start_state(token, model.encoder_salt, position))
    for layer in model.encoder:
        seen = _mixed_over(states, layer.keep, layer.mix, 1, model.channels)
        states = [fold(state + seen) for state in states]
    return states


def _mixed_over(states: Sequence[int], keep: Sequence[int], mix: Sequence[int], sharing: int, channels: int) -> int:
    """Return the mixed sums of the numbers that are kept of all states."""
    sums = [0] * len(keep)
    for state in states:
        add_kept(keep, state, sums)
    return mixed(mix, sums, sharing, channels)


def _check_token(model: Seq2SeqChainModel, token: int) -> None:
    if not 0 <= token < model.vocab_size:
        raise ValueError(f"token {token} is not one of {model.vocab_size}")
