"""The rows of the engine: whole steps of a model, and a trace beside other engines.

They need the engine, which lives above this package (services/orca/bench/gpu), so they are found by name when they
are asked for, and left out where services/ is not on the path.
"""

import importlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from orca.bench.kernels.clock import Clock
from orca.bench.kernels.table import line, milliseconds

MODULE = "orca.bench.gpu.parts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a part of the engine's rows is to measure with."""

    clock: Clock
    dtype: torch.dtype
    copy_bytes_s: float  # of the device's copy: bytes read and written

    @property
    def device(self) -> torch.device:
        return self.clock.device


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """A line of the table. What was not measured is None."""

    name: str
    result: str  # right, or what is not
    is_right: bool = True
    seconds: float | None = None  # None unless it was right
    limit_s: float | None = None
    limit: str = ""  # memory or products
    times_faster: float | None = None  # Orca than this one
    has_gap: bool = False  # whether it has steps, between which the host may let the device wait
    host_gap_s: float | None = None  # between two of them
    more: Mapping[str, Any] = field(default_factory=dict)  # for the JSON only

    @property
    def line(self) -> str:
        gap = milliseconds(self.host_gap_s) if self.has_gap else ""
        return line(
            self.name,
            self.result,
            seconds=self.seconds,
            limit_s=self.limit_s,
            limit=self.limit,
            beside=self.times_faster,
            host_gap=gap,
        )

    def to_json(self) -> dict[str, Any]:
        share = self.limit_s / self.seconds if self.limit_s is not None and self.seconds is not None else None
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"share": share}


Part = Callable[[Asked], Iterator[EngineRow]]


def engine_figures(asked: Asked, names: Sequence[str]) -> dict[str, Any]:
    """Run these parts and print their rows.

    Returns: the rows of each as plain data; nothing where they are left out.
    """
    if not names:
        return {}
    parts = engine_parts(asked.device)
    if isinstance(parts, str):
        print(f"engine rows: left out, {parts}")
        return {}
    threads = torch.get_num_threads()
    try:
        if asked.device.type == "cpu":
            torch.set_num_threads(1)  # for so little they would wait for each other
        return {name: _rows(name, parts[name](asked)) for name in names}
    finally:
        torch.set_num_threads(threads)


def _rows(name: str, measured: Iterator[EngineRow]) -> list[dict[str, Any]]:
    """Those of a part. One that fails ends with a row that says so: the others still run."""
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


def said(error: Exception) -> str:
    """An error in some words of one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:100]


def engine_parts(device: torch.device) -> Mapping[str, Part] | str:
    """The parts by their names, or why they are left out."""
    try:
        parts: Mapping[str, Part] = importlib.import_module(MODULE).PARTS
        if device.type == "cpu":
            importlib.import_module("numba")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{MODULE}.".startswith(f"{error.name}."):
            if error.name is not None and error.name.startswith("orca"):
                raise
            return f"{error.name} is not installed"
        return "services/ is not on PYTHONPATH"
    return parts
