"""What a device knows of the requests that it samples for: one line for each, written when a request is taken up.

A step names lines and the index of each one's next token, and needs nothing else of the host: drawn tokens are counted
and fed on by the kernel that draws them. So a captured launch serves any requests, until a table grows and moves.

    numbers      [lines, 6] float32           temperature and the rest of `Number`
    integers     [lines, 6] int64             seed and the rest of `Integer`
    bias_tokens  [lines, room] int32          of a line's biases, rising
    bias         [lines, room] float32
    masked       [lines, room] int32          tokens that are not allowed before min_tokens
    counts       [count rows, vocab] int16    only of lines with a penalty: 32 KiB for each 16,384 tokens of vocabulary
    fed          [lines] int64                the token drawn last

A count has its lower 15 bits, where it stays at 32,767; the sign says that the token is in the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orca.kernels.contract.transfer import to_device

_ROOM, _COUNT_ROWS = 64, 16
"""At first. What grows moves, and what was captured must be captured again."""
COUNT_MAX = (1 << 15) - 1
IN_PROMPT = -1 << 15
TEMPERATURE_LEAST = 1e-9
"""So cold that only equal logits are not decided; the factor of any colder one may be infinite."""
TEMPERATURE_MOST = 1e30
"""So hot that all logits are equal; the factor of any hotter one may be 0, of which minus infinity has no product."""


class Number(IntEnum):
    """A column of `numbers`, as the field of LineSettings with this name."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


class Integer(IntEnum):
    """A column of `integers`."""

    SEED = 0
    TOP_K = 1  # 0 keeps all
    MIN_TOKENS = 2
    BIASES = 3  # how many entries of `bias` are the line's
    MASKED = 4  # how many of `masked`
    COUNT_ROW = 5  # one more than the row of `counts`; 0 without a penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSettings:
    """How a request is sampled; meaning, ranges and order of effects are those of SamplingParams
    (core/domain/request.py)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()  # token ids rising
    seed: int = 0
    min_tokens: int = 0
    masked: Sequence[int] = ()  # EOS and stop ids

    @property
    def is_penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class Tables(NamedTuple):
    """What kernels read of the lines."""

    numbers: Tensor
    integers: Tensor
    bias_tokens: Tensor
    bias: Tensor
    masked: Tensor
    counts: Tensor


class SamplingLines:
    """The lines of a device. The host writes in the order of its stream and waits for nothing.

    Args:
        lines: how many there can be; `grow` makes more.
        vocab: width of the logits.
    """

    def __init__(self, lines: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.numbers = torch.zeros(lines, len(Number), device=device)
        self.integers = torch.zeros(lines, len(Integer), dtype=torch.int64, device=device)
        self.bias_tokens = torch.zeros(lines, _ROOM, dtype=torch.int32, device=device)
        self.bias = torch.zeros(lines, _ROOM, device=device)
        self.masked = torch.zeros(lines, _ROOM, dtype=torch.int32, device=device)
        self.counts = torch.zeros(_COUNT_ROWS, vocab, dtype=torch.int16, device=device)
        self.last_tokens = torch.zeros(lines, dtype=torch.int64, device=device)
        self.generation = 0
        """Rises when a table has moved: what was captured before must be captured again."""
        self._count_row_of: dict[int, int] = {}
        self._free_count_rows = list(range(_COUNT_ROWS - 1, -1, -1))

    def put(self, line: int, settings: LineSettings, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> None:
        """Have a line mean a request that begins, or begins again, with these tokens; whose it was before is forgotten.

        Args: prompt, output: looked at only where there is a penalty.
        """
        self.drop(line)
        count_row = 1 + self._take_count_row(line, prompt, output) if settings.is_penalised else 0
        temperature = (
            min(max(settings.temperature, TEMPERATURE_LEAST), TEMPERATURE_MOST) if settings.temperature else 0.0
        )
        numbers = (temperature, settings.top_p, settings.min_p)
        penalties = (settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty)
        self.numbers[line].copy_(self._sent(np.array([*numbers, *penalties], np.float32)), non_blocking=True)
        biases, masked = len(settings.logit_bias), len(settings.masked)
        integers = [settings.seed, settings.top_k or 0, settings.min_tokens, biases, masked, count_row]
        self.integers[line].copy_(self._sent(np.array(integers, np.int64)), non_blocking=True)
        if biases > self.bias.shape[1]:
            self.bias_tokens, self.bias = self._wider(self.bias_tokens, biases), self._wider(self.bias, biases)
        if masked > self.masked.shape[1]:
            self.masked = self._wider(self.masked, masked)
        if biases:
            tokens, values = zip(*settings.logit_bias, strict=True)
            self.bias_tokens[line, :biases].copy_(self._sent(np.array(tokens, np.int32)), non_blocking=True)
            self.bias[line, :biases].copy_(self._sent(np.array(values, np.float32)), non_blocking=True)
        if masked:
            self.masked[line, :masked].copy_(self._sent(np.array(settings.masked, np.int32)), non_blocking=True)

    @property
    def tables(self) -> Tables:
        return Tables(self.numbers, self.integers, self.bias_tokens, self.bias, self.masked, self.counts)

    def drop(self, line: int) -> None:
        """Give back what a line has of `counts`. It need not be called before `put`."""
        row = self._count_row_of.pop(line, None)
        if row is not None:
            self._free_count_rows.append(row)

    def grow(self, lines: int) -> None:
        """Make room for so many lines; those that are there stay as they are."""
        for name in ("numbers", "integers", "bias_tokens", "bias", "masked", "fed"):
            setattr(self, name, self._longer(getattr(self, name), lines))

    def _take_count_row(self, line: int, prompt: Sequence[int], output: Sequence[int]) -> int:
        if not self._free_count_rows:
            rows = len(self.counts)
            self._free_count_rows = list(range(rows, 2 * rows))
            self.counts = self._longer(self.counts, 2 * rows)
        row = self._count_row_of[line] = self._free_count_rows.pop()
        tokens, counts = np.unique(np.array(output, np.int64), return_counts=True)
        known = np.union1d(tokens, np.array(prompt, np.int64))
        values = np.where(np.isin(known, np.array(prompt, np.int64)), IN_PROMPT, 0)
        values[np.searchsorted(known, tokens)] += np.minimum(counts, COUNT_MAX)
        self.counts[row].zero_().scatter_(0, self._sent(known), self._sent(values.astype(np.int16)))
        return row

    def _wider(self, table: Tensor, columns: int) -> Tensor:
        """With room for at least so many columns: a power of two, as kernels are compiled anew for a width that is no
        multiple of 16."""
        return self._longer(table.T, 1 << (columns - 1).bit_length()).T.contiguous()

    def _longer(self, table: Tensor, rows: int) -> Tensor:
        assert rows >= len(table)
        self.generation += 1
        longer = table.new_zeros(rows, *table.shape[1:])
        longer[: len(table)] = table
        return longer

    def _sent(self, values: NDArray[np.generic]) -> Tensor:
        return to_device(values, self.last_tokens.device)
