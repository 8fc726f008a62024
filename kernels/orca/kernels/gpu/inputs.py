"""Small kernels that build the inputs of recorded steps on a GPU (recording.py) from the description of a step.

requests   [rows, 6] int64                          read: line, position, token, block; line -1 is padding
tables     [lines, blocks] int32                    written: the block of each row's position
ids, positions, slots  [rows] int64                 written; 0, 0 and -1 for padding
lines      [rows] int32, indices [rows] int64       written: the request's line or -1, and the index of the token
                                                    that the row draws
items      [1 + items, 10] int32                    written: the items of attention (attention.py)
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

_REQUEST_COLUMNS = tl.constexpr(recording.COLUMNS)
_REQUEST_LINE, _REQUEST_POSITION = tl.constexpr(recording.LINE), tl.constexpr(recording.POSITION)
_REQUEST_TOKEN, _REQUEST_BLOCK = tl.constexpr(recording.TOKEN), tl.constexpr(recording.BLOCK)
ROWS_A_PROGRAM = 128
ROWS_MAX = 512
"""Most rows of a usual batch; larger batches have a kernel of their own."""


@operator("tables", "ids", "positions", "slots", "lines", "indices")
def make_rows(
    requests: Tensor,
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
    """Build the rows. Args: see the head of this module; last_tokens, prompts: [lines] int64 (recording.py)."""
    rows, columns = len(requests), tables.shape[1]
    fill_rows[(triton.cdiv(rows, ROWS_A_PROGRAM),)](
        requests,
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
    requests: Tensor,
    keys: Tensor,
    items: Tensor,
    columns: int,
    window: int,
    is_causal: bool,
    positions: int,
    split: int,
    part_lines: int,
) -> None:
    """Build the items of attention.

    Args:
        keys: [lines] int64, the number of keys of each line; read only if attention is not causal.
        columns: number of columns of the tables.
        window: number of positions that a token sees.
        positions: number of positions that attention loads at once.
        split: fewest positions of a part.
        part_lines: rows of `partials` from one part to the next.
    """
    rows = len(requests)
    fill_items[(rows,)](
        requests,
        keys,
        columns,
        items,
        rows,
        window,
        is_causal=is_causal,
        positions=positions,
        split=split,
        part_lines=part_lines,
        block=max(ROWS_MAX, triton.next_power_of_2(rows)),
    )


# Compiled once for all tables and batches.
@triton.jit(do_not_specialize=["columns", "rows"])  # type: ignore[untyped-decorator]
def fill_rows(  # type: ignore[no-untyped-def]
    requests,
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
    """Write the inputs of `block` rows."""
    row = tl.program_id(0) * block + tl.arange(0, block)
    is_row = row < rows
    at = requests + row.to(tl.int64) * _REQUEST_COLUMNS
    line = tl.load(at + _REQUEST_LINE, mask=is_row, other=-1)
    is_request = line >= 0
    position = tl.load(at + _REQUEST_POSITION, mask=is_request, other=0)
    token = tl.load(at + _REQUEST_TOKEN, mask=is_request, other=0)
    cache_block = tl.load(at + _REQUEST_BLOCK, mask=is_request, other=0)
    tl.store(tables + line * columns + position // block_tokens, cache_block.to(tl.int32), mask=is_request)
    its_last_token = tl.load(last_tokens + line, mask=is_request & (token < 0), other=0)
    tl.store(ids + row, tl.where(token < 0, its_last_token, token), mask=is_row)
    tl.store(positions + row, position, mask=is_row)
    slot = cache_block * block_tokens + position % block_tokens
    tl.store(slots + row, tl.where(is_request, slot, -1), mask=is_row)
    tl.store(lines + row, line.to(tl.int32), mask=is_row)
    prompt = tl.load(prompts + line, mask=is_request, other=1)
    tl.store(indices + row, position + 1 - prompt, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _end(position, keys, line, is_causal: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the position after the last one that a row sees."""
    end = position + 1
    if not is_causal:
        end = tl.load(keys + line, mask=line >= 0, other=1)
    return end


@triton.jit  # type: ignore[untyped-decorator]
def _split(position, end, window, positions: tl.constexpr, split: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the begin of a row's context, the positions per part, and the number of parts (attention._ItemBuilder)."""
    begin = tl.maximum(position - window + 1, 0) // positions * positions
    length = end - begin
    its_split = tl.cdiv(length, PARTS_MAX * split) * split
    return begin, its_split, tl.cdiv(length, its_split)


@triton.jit(do_not_specialize=["columns", "rows", "window"])  # type: ignore[untyped-decorator]
def fill_items(  # type: ignore[no-untyped-def]
    requests,
    keys,
    columns,
    items,
    rows,
    window,
    is_causal: tl.constexpr,
    positions: tl.constexpr,
    split: tl.constexpr,
    part_lines: tl.constexpr,
    block: tl.constexpr,
):
    """Write the items of one row, with the same split as attention._ItemBuilder.

    A padding row gets an empty context, so that its result is always the same. block: at least `rows`.
    """
    own = tl.program_id(0)
    other = tl.arange(0, block)
    at = requests + other.to(tl.int64) * _REQUEST_COLUMNS
    line = tl.load(at + _REQUEST_LINE, mask=other < rows, other=-1)
    position = tl.load(at + _REQUEST_POSITION, mask=line >= 0, other=0)
    _, _, its_parts = _split(position, _end(position, keys, line, is_causal), window, positions, split)
    its_parts = tl.where(other < rows, its_parts, 0)
    is_cut = its_parts > 1
    is_before = other < own
    first_item = tl.sum(tl.where(is_before, its_parts, 0)).to(tl.int32)
    first_part = tl.sum(tl.where(is_before & is_cut, its_parts, 0)).to(tl.int32) * part_lines
    tile = tl.sum(tl.where(is_before & is_cut, 1, 0)).to(tl.int32)
    if own == 0:
        tl.store(items, tl.sum(its_parts).to(tl.int32))
        tl.store(items + 1, 0)

    own_line = tl.load(requests + own * _REQUEST_COLUMNS + _REQUEST_LINE)
    is_request = own_line >= 0
    own_position = tl.where(is_request, tl.load(requests + own * _REQUEST_COLUMNS + _REQUEST_POSITION), 0)
    own_end = _end(own_position, keys, own_line, is_causal)
    end = tl.where(is_request, own_end, 0)
    table = tl.where(is_request, own_line * columns, 0).to(tl.int32)
    begin, own_split, parts = _split(own_position, own_end, window, positions, split)
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
