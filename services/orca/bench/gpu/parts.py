"""The engine's parts of `orca bench gpu`: decode steps of a model, a trace beside other engines, and a translation."""

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from orca.bench.gpu.decode import decode_rows
from orca.bench.gpu.paper_trace import trace_rows
from orca.bench.gpu.rows import Asked, EngineRow, Part, said
from orca.bench.gpu.seq2seq.translation import translation_rows

PARTS: Mapping[str, Part] = {"decode": decode_rows, "trace": trace_rows, "translation": translation_rows}


def engine_figures(asked: Asked, names: Sequence[str]) -> dict[str, Any]:
    """Run these parts and print their rows.

    Returns: the rows of each part as plain data.
    """
    threads = torch.get_num_threads()
    try:
        if asked.device.type == "cpu":
            torch.set_num_threads(1)  # for so little work, threads would mostly wait for each other
        return {name: _rows(name, PARTS[name](asked)) for name in names}
    finally:
        torch.set_num_threads(threads)


def _rows(name: str, measured: Iterator[EngineRow]) -> list[dict[str, Any]]:
    """Return the rows of a part. A part that fails ends with a row that shows the error, and the others still run."""
    start_s = time.perf_counter()
    rows = []
    for row in _with_failure(name, measured):
        print(row.line, flush=True)
        rows.append(row.to_json())
    print(f"{name} took {time.perf_counter() - start_s:.0f} s")
    return rows


def _with_failure(name: str, measured: Iterator[EngineRow]) -> Iterator[EngineRow]:
    try:
        yield from measured
    except Exception as error:
        traceback.print_exc()
        yield EngineRow(name=name, result=f"FAILED: {said(error)}", is_right=False)
