"""Recorded steps on a CPU (recording.py): all kernels of a step in one native call (numba_team.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray

from orca.kernels.numba_attention import CpuAttention
from orca.kernels.numba_intrinsics import elements, take
from orca.kernels.numba_team import Kernel, recorded
from orca.kernels.recording import BLOCK, COLUMNS, LINE, POSITION, TOKEN, Lines, Made
from orca.kernels.reference import Sight


class CpuRecorder:
    only_kernels = True
    recordings_max = 16

    def rows_of(self, requests: int) -> int:
        """Each number of requests has a recording: on a CPU a row costs what it computes."""
        return requests

    def inputs(self, rows: int, lines: Lines, *, slots: int, block_tokens: int) -> "CpuInputs":
        del slots
        return CpuInputs(rows, lines, block_tokens)

    def forget(self) -> None:
        """They share nothing."""

    def record(
        self, compute: Callable[[], Made], captured: Callable[[], Made] | None = None
    ) -> tuple[Made, Callable[[], None]]:
        assert captured is None
        with recorded() as recording:
            made = compute()
        return made, recording.run


class CpuInputs:
    """As recording.StepInputs."""

    sampled = None

    def __init__(self, rows: int, lines: Lines, block_tokens: int) -> None:
        self._lines, self._block_tokens = lines, block_tokens
        # Behind the rows' columns, the place of each tile: large tasks first, as CpuAttention has them.
        self._said = torch.empty(rows, COLUMNS + 1, dtype=torch.int64)
        self._said_rows = self._said.numpy()
        self.ids, self.positions, self.slots = (torch.empty(rows, dtype=torch.int64) for _ in range(3))
        self._tiles = torch.empty(rows, CpuAttention.TILE_COLUMNS, dtype=torch.int64)

    def put(self, said: NDArray[np.int64]) -> None:
        self._said_rows[:, :COLUMNS] = said
        self._said_rows[:, COLUMNS] = np.argsort(-said[:, POSITION], kind="stable")

    def lay_out(self) -> None:
        tables, fed, _ = self._lines
        written = (self.ids, self.positions, self.slots, self._tiles)
        addresses = (each.data_ptr() for each in (self._said, tables, fed, *written))
        _lay_out(1, *addresses, len(self._said), *tables.shape, len(fed), self._block_tokens)

    def attention(self, seen: Sight) -> CpuAttention:
        assert seen.tables is self._lines.tables
        return CpuAttention.of_tiles(self._tiles, seen)


def _lay_out_rows(args: Any) -> None:
    if take(args) > 0:
        return
    rows, lines, columns, fed_lines, block_tokens = args[9], args[10], args[11], args[12], args[13]
    said = carray(elements(args[2], np.int64), (rows, COLUMNS + 1))
    tables = carray(elements(args[3], np.int32), (lines, columns))
    fed = carray(elements(args[4], np.int64), (fed_lines,))
    ids, positions = carray(elements(args[5], np.int64), (rows,)), carray(elements(args[6], np.int64), (rows,))
    slots, tiles = carray(elements(args[7], np.int64), (rows,)), carray(elements(args[8], np.int64), (rows, 4))
    for row in range(rows):
        line, position, token, block = said[row, LINE], said[row, POSITION], said[row, TOKEN], said[row, BLOCK]
        tables[line, position // block_tokens] = block
        ids[row] = fed[line] if token < 0 else token
        positions[row] = position
        slots[row] = block * block_tokens + position % block_tokens
        other = said[row, COLUMNS]
        tiles[row, 0], tiles[row, 1], tiles[row, 2], tiles[row, 3] = said[other, LINE], said[other, POSITION], 1, other


_lay_out = Kernel("lay_out", _lay_out_rows)


def kernels() -> list[Kernel]:
    return [_lay_out]
