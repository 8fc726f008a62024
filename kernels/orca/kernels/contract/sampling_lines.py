"""The sampling state that a device keeps: one line per request, written when the request begins.

A step names lines and the index of each line's next token, and needs nothing else from the host. The kernel that draws
a token also counts it and stores it as the next input. So a captured launch serves any requests, until a table grows
and moves.

    numbers      [lines, 6] float32           temperature and the other columns of `FloatColumn`
    integers     [lines, 6] int64             seed and the other columns of `IntColumn`
    bias_tokens  [lines, room] int32          tokens of a line's biases, ascending
    bias         [lines, room] float32
    masked       [lines, room] int32          tokens that are not allowed before min_tokens
    counts       [count rows, vocab] int16    only for lines with a penalty: 32 KiB per 16,384 tokens of vocabulary
    last_tokens  [lines] int64                the token drawn last

The lower 15 bits of a count are the count, at most 32,767; the sign bit is set if the token is in the prompt.
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
"""Initial sizes. A table that grows moves, and whatever was captured must then be captured again."""
COUNT_MAX = (1 << 15) - 1
IN_PROMPT = -1 << 15
TEMPERATURE_LEAST = 1e-9
"""Lowest temperature: only equal logits are undecided. The factor of a lower one could be infinite."""
TEMPERATURE_MOST = 1e30
"""Highest temperature: all logits count as equal. The factor of a higher one could be 0, and 0 x -infinity is NaN."""


class FloatColumn(IntEnum):
    """A column of `numbers`; it holds the field of LineSettings with this name."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


class IntColumn(IntEnum):
    """A column of `integers`."""

    SEED = 0
    TOP_K = 1  # 0 keeps all
    MIN_TOKENS = 2
    BIASES = 3  # number of used entries of `bias`
    MASKED = 4  # number of used entries of `masked`
    COUNT_ROW = 5  # row of `counts` plus one; 0 without a penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSettings:
    """The sampling settings of a request.

    Meaning, ranges and order of effects are those of SamplingParams (core/domain/request.py).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()  # token ids ascending
    seed: int = 0
    min_tokens: int = 0
    masked: Sequence[int] = ()  # EOS and stop ids

    @property
    def is_penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class SamplingTables(NamedTuple):
    """The tables that kernels read."""

    numbers: Tensor
    integers: Tensor
    bias_tokens: Tensor
    bias: Tensor
    masked: Tensor
    counts: Tensor


class SamplingLines:
    """The lines of a device. The host writes in the order of its stream and never waits.

    Args:
        lines: number of lines; `grow` makes more.
        vocab: width of the logits.
    """

    def __init__(self, lines: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.numbers = torch.zeros(lines, len(FloatColumn), device=device)
        self.integers = torch.zeros(lines, len(IntColumn), dtype=torch.int64, device=device)
        self.bias_tokens = torch.zeros(lines, _ROOM, dtype=torch.int32, device=device)
        self.bias = torch.zeros(lines, _ROOM, device=device)
        self.masked = torch.zeros(lines, _ROOM, dtype=torch.int32, device=device)
        self.counts = torch.zeros(_COUNT_ROWS, vocab, dtype=torch.int16, device=device)
        self.last_tokens = torch.zeros(lines, dtype=torch.int64, device=device)
        self.generation = 0
        """Rises when a table has moved: whatever was captured before must be captured again."""
        self._count_row_of: dict[int, int] = {}
        self._free_count_rows = list(range(_COUNT_ROWS - 1, -1, -1))

    def put(self, line: int, settings: LineSettings, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> None:
        """Assign a line to a request that begins, or begins again, with these tokens. Its earlier request is dropped.

        Args: prompt, output: needed only with a penalty.
        """
        self.drop(line)
        count_row = 1 + self._take_count_row(line, prompt, output) if settings.is_penalised else 0
        temperature = (
            min(max(settings.temperature, TEMPERATURE_LEAST), TEMPERATURE_MOST) if settings.temperature else 0.0
        )
        numbers = (temperature, settings.top_p, settings.min_p)
        penalties = (settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty)
        self.numbers[line].copy_(self._to_device(np.array([*numbers, *penalties], np.float32)), non_blocking=True)
        biases, masked = len(settings.logit_bias), len(settings.masked)
        integers = [settings.seed, settings.top_k or 0, settings.min_tokens, biases, masked, count_row]
        self.integers[line].copy_(self._to_device(np.array(integers, np.int64)), non_blocking=True)
        if biases > self.bias.shape[1]:
            self.bias_tokens, self.bias = self._wider(self.bias_tokens, biases), self._wider(self.bias, biases)
        if masked > self.masked.shape[1]:
            self.masked = self._wider(self.masked, masked)
        if biases:
            tokens, values = zip(*settings.logit_bias, strict=True)
            self.bias_tokens[line, :biases].copy_(self._to_device(np.array(tokens, np.int32)), non_blocking=True)
            self.bias[line, :biases].copy_(self._to_device(np.array(values, np.float32)), non_blocking=True)
        if masked:
            self.masked[line, :masked].copy_(self._to_device(np.array(settings.masked, np.int32)), non_blocking=True)

    @property
    def tables(self) -> SamplingTables:
        return SamplingTables(self.numbers, self.integers, self.bias_tokens, self.bias, self.masked, self.counts)

    def drop(self, line: int) -> None:
        """Free the row of `counts` of a line. `put` does this by itself."""
        row = self._count_row_of.pop(line, None)
        if row is not None:
            self._free_count_rows.append(row)

    def grow(self, lines: int) -> None:
        """Make room for this many lines. Existing lines keep their content."""
        for name in ("numbers", "integers", "bias_tokens", "bias", "masked", "last_tokens"):
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
        self.counts[row].zero_().scatter_(0, self._to_device(known), self._to_device(values.astype(np.int16)))
        return row

    def _wider(self, table: Tensor, columns: int) -> Tensor:
        """Return a copy of the table with at least this many columns.

        The number is a power of two: kernels are compiled again for a width that is no multiple of 16.
        """
        return self._longer(table.T, 1 << (columns - 1).bit_length()).T.contiguous()

    def _longer(self, table: Tensor, rows: int) -> Tensor:
        assert rows >= len(table)
        self.generation += 1
        longer = table.new_zeros(rows, *table.shape[1:])
        longer[: len(table)] = table
        return longer

    def _to_device(self, values: NDArray[np.generic]) -> Tensor:
        return to_device(values, self.last_tokens.device)
