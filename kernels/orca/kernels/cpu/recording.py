"""Recorded steps on a CPU (recording.py): all kernels of a step in one native call (team.py).

A recording runs on any number of rows that there is memory for. What of that memory was never used takes none, so most
steps share two recordings: one for all tokens, one for those of which some are wanted.
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
    Made,
    RecordingSize,
    RequestLines,
    StepDescription,
)
from orca.kernels.contract.reference import AttentionView
from orca.kernels.cpu.attention.attention import TILE_COLUMNS, CpuAttention, tile_tokens
from orca.kernels.cpu.team.intrinsics import FAST, elements, take
from orca.kernels.cpu.team.team import Kernel, Rows, recorded, vary


class CpuRecorder:
    only_kernels = True
    recordings_max = 4
    chunk_tokens_max = 512
    """Twice what `orca up` has by default. In longer steps Python's share is small."""

    def size_of(self, said: StepDescription) -> RecordingSize:
        tokens = max(self.chunk_tokens_max, 1 << (said.tokens - 1).bit_length())
        return RecordingSize(tokens, None if said.wanted is None else tokens)

    def inputs(self, size: RecordingSize, lines: RequestLines, *, slots: int, block_tokens: int) -> "CpuInputs":
        del slots
        return CpuInputs(size, lines, block_tokens)

    def clear(self) -> None:
        """They share nothing."""

    def record(
        self, compute: Callable[[], Made], captured: Callable[[], Made] | None = None
    ) -> tuple[Made, Callable[[], None]]:
        assert captured is None
        with recorded() as recording:
            made = compute()
        return made, recording.run


class _Wanted(NamedTuple):
    count: Rows
    rows: Tensor
    tiles: Tensor


class CpuInputs:
    """As recording.StepInputs."""

    sampled = None

    def __init__(self, size: RecordingSize, lines: RequestLines, block_tokens: int) -> None:
        self._lines, self._block_tokens = lines, block_tokens
        self._requests, self._tokens, self._tiles = (Rows(size.tokens) for _ in range(3))
        self._said = _numbers(size.tokens, COLUMNS)
        self._said_requests = self._said.numpy()
        self.ids, self.positions, self.slots = (_numbers(size.tokens) for _ in range(3))
        self._ids = self.ids.numpy()
        self._all_tiles = _numbers(size.tokens, TILE_COLUMNS)
        self._tile_tokens = 1
        self._wanted: _Wanted | None = None
        if size.wanted is not None:
            self._wanted = _Wanted(Rows(size.wanted), _numbers(size.wanted), _numbers(size.wanted, TILE_COLUMNS))

    @property
    def wanted(self) -> Tensor | None:
        return None if self._wanted is None else self._wanted.rows

    def put(self, said: StepDescription) -> None:
        requests = len(said.requests)
        self._said_requests[:requests] = said.requests
        self._requests.now, self._tokens.now, self._tiles.now = requests, said.tokens, requests
        if said.tokens > requests:
            self._tiles.now = sum(-(-count // self._tile_tokens) for count in said.requests[:, COUNT].tolist())
        for first, tokens in said.chunks:
            self._ids[first : first + len(tokens)] = tokens
        if self._wanted is not None:
            assert said.wanted is not None
            self._wanted.count.now = said.wanted

    def build(self, extra_inputs: Sequence[Tensor] = ()) -> None:
        vary(self._requests, self._said)
        vary(self._tokens, self.ids, self.positions, self.slots, *extra_inputs)
        vary(self._tiles, self._all_tiles)
        wanted = 0, 0
        if self._wanted is not None:
            vary(self._wanted.count, self._wanted.rows, self._wanted.tiles)
            wanted = self._wanted.rows.data_ptr(), self._wanted.tiles.data_ptr()
        tables, last_tokens, _ = self._lines
        written = (self.ids, self.positions, self.slots, self._all_tiles)
        addresses = (each.data_ptr() for each in (self._said, tables, last_tokens, *written))
        sizes = (self._requests, *tables.shape, len(last_tokens), self._block_tokens, self._tile_tokens)
        _lay_out(1, *addresses, *wanted, *sizes)

    def attention(self, seen: AttentionView, *, wanted_only: bool = False) -> CpuAttention:
        assert seen.tables is self._lines.tables
        if wanted_only:
            assert self._wanted is not None
            return CpuAttention.of_tiles(self._wanted.tiles, seen)
        self._tile_tokens = tile_tokens(seen)  # the same under each window
        return CpuAttention.of_tiles(self._all_tiles, seen)


def _numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def _lay_out_rows(args: Any) -> None:
    if take(args) > 0:
        return
    requests, lines, columns, fed_lines = args[11], args[12], args[13], args[14]
    block_tokens, tile_tokens = args[15], args[16]
    said = carray(elements(args[2], np.int64), (requests, COLUMNS))
    tables = carray(elements(args[3], np.int32), (lines, columns))
    last_tokens = carray(elements(args[4], np.int64), (fed_lines,))
    ids, positions, slots = elements(args[5], np.int64), elements(args[6], np.int64), elements(args[7], np.int64)
    tiles, wanted_at, wanted_tiles = args[8], args[9], args[10]
    wanted = elements(wanted_at, np.int64)
    token = tile = wanted_rows = 0
    for row in range(requests):
        line, position, count = said[row, LINE], said[row, POSITION], said[row, COUNT]
        if count == 1:
            ids[token] = last_tokens[line] if said[row, TOKEN] < 0 else said[row, TOKEN]
        for done in range(count):
            here = position + done
            positions[token + done] = here
            slots[token + done] = np.int64(tables[line, here // block_tokens]) * block_tokens + here % block_tokens
        # The last ones, which see most, first: large ones come first.
        for place in range((count - 1) // tile_tokens, -1, -1):
            done = place * tile_tokens
            _put_tile(tiles, tile, line, position + done, min(tile_tokens, count - done), token + done)
            tile += 1
        token += count
        if wanted_at != 0 and said[row, IS_WANTED] != 0:
            wanted[wanted_rows] = token - 1
            _put_tile(wanted_tiles, wanted_rows, line, position + count - 1, 1, wanted_rows)
            wanted_rows += 1


@njit(**FAST)  # type: ignore[untyped-decorator]
def _put_tile(tiles_at: Any, number: Any, line: Any, position: Any, count: Any, first: Any) -> None:
    """Among `number` tiles (CpuAttention), large ones first, so that none is left to one thread while the others have
    nothing to do."""
    tiles = carray(elements(tiles_at, np.int64), (number + 1, TILE_COLUMNS))
    place, size = number, (position + count) * count
    while place > 0 and (tiles[place - 1, 1] + tiles[place - 1, 2]) * tiles[place - 1, 2] < size:
        tiles[place] = tiles[place - 1]
        place -= 1
    tiles[place, 0], tiles[place, 1], tiles[place, 2], tiles[place, 3] = line, position, count, first


_lay_out = Kernel("lay_out", _lay_out_rows)


def kernels() -> list[Kernel]:
    return [_lay_out]
