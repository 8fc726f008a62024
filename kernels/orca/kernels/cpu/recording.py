"""Recorded steps on a CPU (contract/recording.py): all kernels of a step in one native call (team/team.py).

A recording runs with any number of rows up to its size. Memory that was never touched costs nothing, so most steps
share two recordings: one for steps in which all tokens are wanted, one for the others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from orca.kernels.contract.recording import (
    COLUMNS,
    COUNT,
    IS_WANTED,
    LINE,
    POSITION,
    TOKEN,
    Recorded,
    RecordingSize,
    RequestLines,
    StepDescription,
)
from orca.kernels.contract.reference import AttentionView
from orca.kernels.cpu.attention.attention import TILE_COLUMNS, CpuAttention, tile_tokens
from orca.kernels.cpu.rows import address_of
from orca.kernels.cpu.team.intrinsics import FAST, next_task, pointer
from orca.kernels.cpu.team.team import Kernel, RowCount, bind_rows, record_calls


class CpuRecorder:
    """See contract.recording.Recorder."""

    only_kernels = True
    recordings_max = 4
    chunk_tokens_max = 512
    """Twice the default of `orca up`. In longer steps Python takes only a small part of the time."""

    def size_of(self, step: StepDescription) -> RecordingSize:
        tokens = max(self.chunk_tokens_max, 1 << (step.tokens - 1).bit_length())
        return RecordingSize(tokens, None if step.wanted is None else tokens)

    def inputs(self, size: RecordingSize, lines: RequestLines, *, slots: int, block_tokens: int) -> "CpuInputs":
        del slots
        return CpuInputs(size, lines, block_tokens)

    def clear(self) -> None:
        """Do nothing: recordings share no memory."""

    def record(
        self, compute: Callable[[], Recorded], captured: Callable[[], Recorded] | None = None
    ) -> tuple[Recorded, Callable[[], None]]:
        assert captured is None
        with record_calls() as recording:
            made = compute()
        return made, recording.run


class _Tiles(NamedTuple):
    """The tiles of attention (cpu/attention/attention.py); None for attention that there is not."""

    causal: Tensor | None = None
    cross: Tensor | None = None

    @classmethod
    def of(cls, maximum: int, lines: RequestLines) -> "_Tiles":
        """Allocate memory for as many tiles of each kind."""
        has_sources = lines.source_tables is not None
        return cls(_numbers(maximum, TILE_COLUMNS), _numbers(maximum, TILE_COLUMNS) if has_sources else None)

    def bind(self, count: RowCount) -> None:
        bind_rows(count, *(tiles for tiles in self if tiles is not None))

    def attention(self, view: AttentionView) -> CpuAttention:
        tiles = self.causal if view.is_causal else self.cross
        assert tiles is not None
        return CpuAttention.of_tiles(tiles, view)


class _WantedRows(NamedTuple):
    count: RowCount
    rows: Tensor
    tiles: _Tiles


class CpuInputs:
    """See contract.recording.StepInputs."""

    sampled = None

    def __init__(self, size: RecordingSize, lines: RequestLines, block_tokens: int) -> None:
        self._lines, self._block_tokens = lines, block_tokens
        self._requests, self._tokens, self._tiles = (RowCount(size.tokens) for _ in range(3))
        self._step_rows = _numbers(size.tokens, COLUMNS)
        self._step_requests = self._step_rows.numpy()
        self.ids, self.positions, self.slots = (_numbers(size.tokens) for _ in range(3))
        self._ids = self.ids.numpy()
        self._all_tiles = _Tiles.of(size.tokens, lines)
        self._tile_tokens = 1
        self._wanted: _WantedRows | None = None
        if size.wanted is not None:
            self._wanted = _WantedRows(RowCount(size.wanted), _numbers(size.wanted), _Tiles.of(size.wanted, lines))

    @property
    def wanted(self) -> Tensor | None:
        return None if self._wanted is None else self._wanted.rows

    def put(self, step: StepDescription) -> None:
        requests = len(step.requests)
        self._step_requests[:requests] = step.requests
        self._requests.current, self._tokens.current, self._tiles.current = requests, step.tokens, requests
        if step.tokens > requests:
            self._tiles.current = sum(-(-count // self._tile_tokens) for count in step.requests[:, COUNT].tolist())
        for first, tokens in step.chunks:
            self._ids[first : first + len(tokens)] = tokens
        if self._wanted is not None:
            assert step.wanted is not None
            self._wanted.count.current = step.wanted

    def build(self, extra_inputs: Sequence[Tensor] = ()) -> None:
        bind_rows(self._requests, self._step_rows)
        bind_rows(self._tokens, self.ids, self.positions, self.slots, *extra_inputs)
        self._all_tiles.bind(self._tiles)
        wanted_rows, wanted_tiles = None, _Tiles()
        if self._wanted is not None:
            bind_rows(self._wanted.count, self._wanted.rows)
            self._wanted.tiles.bind(self._wanted.count)
            wanted_rows, wanted_tiles = self._wanted.rows, self._wanted.tiles
        tables, last_tokens, sources = self._lines.tables, self._lines.last_tokens, self._lines.sources
        read = (self._step_rows, tables, last_tokens, sources)
        written = (self.ids, self.positions, self.slots, *self._all_tiles, wanted_rows, *wanted_tiles)
        sizes = (self._requests, *tables.shape, self._block_tokens, self._tile_tokens)
        _fill(1, *map(address_of, (*read, *written)), *sizes)

    def attention(self, view: AttentionView, *, wanted_only: bool = False) -> CpuAttention:
        assert view.tables is (self._lines.tables if view.is_causal else self._lines.source_tables)
        if wanted_only:
            assert self._wanted is not None
            return self._wanted.tiles.attention(view)
        self._tile_tokens = tile_tokens(view)  # the same under each window, and in cross attention
        return self._all_tiles.attention(view)


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def _fill_rows(args: Any) -> None:
    if next_task(args) > 0:
        return
    tiles, cross_tiles, wanted_at, wanted_tiles, wanted_cross_tiles = args[9], args[10], args[11], args[12], args[13]
    requests, lines, columns, block_tokens, tile_tokens = args[14], args[15], args[16], args[17], args[18]
    step = carray(pointer(args[2], np.int64), (requests, COLUMNS))
    tables = carray(pointer(args[3], np.int32), (lines, columns))
    last_tokens, sources = carray(pointer(args[4], np.int64), (lines,)), carray(pointer(args[5], np.int64), (lines,))
    ids, positions, slots = pointer(args[6], np.int64), pointer(args[7], np.int64), pointer(args[8], np.int64)
    wanted = pointer(wanted_at, np.int64)
    token = tile = wanted_rows = 0
    for row in range(requests):
        line, position, count = step[row, LINE], step[row, POSITION], step[row, COUNT]
        if count == 1:
            ids[token] = last_tokens[line] if step[row, TOKEN] < 0 else step[row, TOKEN]
        for done in range(count):
            here = position + done
            positions[token + done] = here
            slots[token + done] = np.int64(tables[line, here // block_tokens]) * block_tokens + here % block_tokens
        # Begin with the last tile, which sees most of the context: large tiles come first.
        for place in range((count - 1) // tile_tokens, -1, -1):
            done = place * tile_tokens
            here, some = position + done, min(tile_tokens, count - done)
            _insert_tile(tiles, tile, (line, here, some, token + done, here + some))
            if cross_tiles != 0:
                _insert_tile(cross_tiles, tile, (line, here, some, token + done, sources[line]))
            tile += 1
        token += count
        if wanted_at != 0 and step[row, IS_WANTED] != 0:
            end = position + count
            wanted[wanted_rows] = token - 1
            _insert_tile(wanted_tiles, wanted_rows, (line, end - 1, 1, wanted_rows, end))
            if wanted_cross_tiles != 0:
                _insert_tile(wanted_cross_tiles, wanted_rows, (line, end - 1, 1, wanted_rows, sources[line]))
            wanted_rows += 1


@njit(**FAST)  # type: ignore[untyped-decorator]
def _insert_tile(tiles_at: Any, number: Any, tile: Any) -> None:
    """Insert a tile into `number` tiles that are sorted by size, the largest first (see CpuAttention)."""
    tiles = carray(pointer(tiles_at, np.int64), (number + 1, TILE_COLUMNS))
    line, position, count, first, end = tile
    place = number
    while place > 0 and tiles[place - 1, 4] * tiles[place - 1, 2] < end * count:
        tiles[place] = tiles[place - 1]
        place -= 1
    tiles[place, 0], tiles[place, 1], tiles[place, 2], tiles[place, 3] = line, position, count, first
    tiles[place, 4] = end


_fill = Kernel("fill", _fill_rows)


def kernels() -> list[Kernel]:
    return [_fill]
