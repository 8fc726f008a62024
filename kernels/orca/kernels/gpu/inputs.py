"""The inputs of recorded steps on a GPU (recording.py), made out of what was told of the requests, by small launches.

said       [rows, 6] int64                          read: line, position, token, block; a line of -1 is padding
tables     [lines, blocks] int32                    the block of each row's position is written
ids, positions, slots  [rows] int64                 written; of padding 0, 0 and -1
lines      [rows] int32, indices [rows] int64       written: the request's line or -1, and the index of the token
                                                    that the row draws
items      [1 + items, 10] int32                    written: what attention does (attention.py)
"""

import triton
import triton.language as tl
from torch import Tensor

from orca.kernels.contract import recording
from orca.kernels.gpu.attention_item import (
    BEGIN,
    COLUMNS,
    COUNT,
    END,
    FIRST,
    FIRST_PART,
    PART,
    PARTS,
    PARTS_MAX,
    POSITION,
    TABLE,
    TILE,
)
from orca.kernels.gpu.torch_operator import operator

_SAID_COLUMNS = tl.constexpr(recording.COLUMNS)
_SAID_LINE, _SAID_POSITION = tl.constexpr(recording.LINE), tl.constexpr(recording.POSITION)
_SAID_TOKEN, _SAID_BLOCK = tl.constexpr(recording.TOKEN), tl.constexpr(recording.BLOCK)
ROWS_A_PROGRAM = 128
ROWS_MAX = 512
"""Of a batch, as a rule: larger ones have a kernel of their own."""


@operator("tables", "ids", "positions", "slots", "lines", "indices")
def make_rows(
    said: Tensor,
    tables: Tensor,
    last_tokens: Tensor,
    prompts: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    lines: Tensor,
    indices: Tensor,
    block_tokens: int,
) -> None:
    """What each row is. Args: as above; fed, prompts: [lines] int64 (recording.py)."""
    rows, columns = len(said), tables.shape[1]
    lay_out_rows[(triton.cdiv(rows, ROWS_A_PROGRAM),)](
        said,
        tables,
        columns,
        last_tokens,
        prompts,
        ids,
        positions,
        slots,
        lines,
        indices,
        rows,
        block_tokens=block_tokens,
        block=ROWS_A_PROGRAM,
    )


@operator("items")
def make_items(
    said: Tensor, items: Tensor, columns: int, window: int, positions: int, split: int, part_lines: int
) -> None:
    """What attention does.

    Args:
        columns: of the tables.
        window: positions that a token sees.
        positions: that attention takes at once.
        split: positions of a part, at least.
        part_lines: rows of `partials` from one part to the next.
    """
    rows = len(said)
    lay_out_items[(rows,)](
        said,
        columns,
        items,
        rows,
        window,
        positions=positions,
        split=split,
        part_lines=part_lines,
        block=max(ROWS_MAX, triton.next_power_of_2(rows)),
    )


# Compiled once for all tables and batches.
@triton.jit(do_not_specialize=["columns", "rows"])  # type: ignore[untyped-decorator]
def lay_out_rows(  # type: ignore[no-untyped-def]
    said,
    tables,
    columns,
    last_tokens,
    prompts,
    ids,
    positions,
    slots,
    lines,
    indices,
    rows,
    block_tokens: tl.constexpr,
    block: tl.constexpr,
):
    """What each row is. A program has `block` rows."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    is_row = row < rows
    at = said + row.to(tl.int64) * _SAID_COLUMNS
    line = tl.load(at + _SAID_LINE, mask=is_row, other=-1)
    is_asked = line >= 0
    position = tl.load(at + _SAID_POSITION, mask=is_asked, other=0)
    token = tl.load(at + _SAID_TOKEN, mask=is_asked, other=0)
    cache_block = tl.load(at + _SAID_BLOCK, mask=is_asked, other=0)
    tl.store(tables + line * columns + position // block_tokens, cache_block.to(tl.int32), mask=is_asked)
    its_fed = tl.load(last_tokens + line, mask=is_asked & (token < 0), other=0)
    tl.store(ids + row, tl.where(token < 0, its_fed, token), mask=is_row)
    tl.store(positions + row, position, mask=is_row)
    slot = cache_block * block_tokens + position % block_tokens
    tl.store(slots + row, tl.where(is_asked, slot, -1), mask=is_row)
    tl.store(lines + row, line.to(tl.int32), mask=is_row)
    prompt = tl.load(prompts + line, mask=is_asked, other=1)
    tl.store(indices + row, position + 1 - prompt, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _cut(position, window, positions: tl.constexpr, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a row's context begins, how many positions its parts have, and how many parts (triton_attention._Items)."""
    begin = tl.maximum(position - window + 1, 0) // positions * positions
    length = position + 1 - begin
    its_split = tl.cdiv(length, PARTS_MAX * split) * split
    return begin, its_split, tl.cdiv(length, its_split)


@triton.jit(do_not_specialize=["columns", "rows", "window"])  # type: ignore[untyped-decorator]
def lay_out_items(  # type: ignore[no-untyped-def]
    said,
    columns,
    items,
    rows,
    window,
    positions: tl.constexpr,
    split: tl.constexpr,
    part_lines: tl.constexpr,
    block: tl.constexpr,
):
    """The items of one row: its context, cut as triton_attention._Items cuts it; of padding an empty one, so that the
    same is computed of it each time. block: at least `rows`."""
    own = tl.program_id(0)
    other = tl.arange(0, block)
    at = said + other.to(tl.int64) * _SAID_COLUMNS
    line = tl.load(at + _SAID_LINE, mask=other < rows, other=-1)
    position = tl.load(at + _SAID_POSITION, mask=line >= 0, other=0)
    _, _, its_parts = _cut(position, window, positions, split)
    its_parts = tl.where(other < rows, its_parts, 0)
    is_cut = its_parts > 1
    is_before = other < own
    first_item = tl.sum(tl.where(is_before, its_parts, 0)).to(tl.int32)
    first_part = tl.sum(tl.where(is_before & is_cut, its_parts, 0)).to(tl.int32) * part_lines
    tile = tl.sum(tl.where(is_before & is_cut, 1, 0)).to(tl.int32)
    if own == 0:
        tl.store(items, tl.sum(its_parts).to(tl.int32))
        tl.store(items + 1, 0)

    own_line = tl.load(said + own * _SAID_COLUMNS + _SAID_LINE)
    is_asked = own_line >= 0
    own_position = tl.where(is_asked, tl.load(said + own * _SAID_COLUMNS + _SAID_POSITION), 0)
    end = tl.where(is_asked, own_position + 1, 0)
    table = tl.where(is_asked, own_line * columns, 0).to(tl.int32)
    begin, own_split, parts = _cut(own_position, window, positions, split)
    part = tl.arange(0, PARTS_MAX)
    low = begin + part * own_split
    high = tl.minimum(low + own_split, end)
    item = items + (1 + first_item + part).to(tl.int64) * COLUMNS
    is_mine = part < parts
    tl.store(item + FIRST, own, mask=is_mine)
    tl.store(item + COUNT, 1, mask=is_mine)
    tl.store(item + POSITION, own_position.to(tl.int32), mask=is_mine)
    tl.store(item + TABLE, table, mask=is_mine)
    tl.store(item + BEGIN, low.to(tl.int32), mask=is_mine)
    tl.store(item + END, high.to(tl.int32), mask=is_mine)
    tl.store(item + PART, tl.where(parts > 1, first_part + part * part_lines, -1), mask=is_mine)
    tl.store(item + FIRST_PART, first_part, mask=is_mine)
    tl.store(item + PARTS, parts.to(tl.int32), mask=is_mine)
    tl.store(item + TILE, tile, mask=is_mine)
