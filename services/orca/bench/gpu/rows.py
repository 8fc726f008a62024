"""Rows of the table that `orca bench gpu` prints: the arguments of a measurement of the engine, and its results."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from orca.bench.kernels.clock import Clock
from orca.bench.kernels.table import line, milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The clock, the dtype and the speed of a copy that a part of the engine's rows gets."""

    clock: Clock
    dtype: torch.dtype
    copy_bytes_s: float  # of the device's copy: bytes read and written

    @property
    def device(self) -> torch.device:
        return self.clock.device


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """A line of the table. A quantity that was not measured is None."""

    name: str
    result: str  # right, or a description of the errors
    is_right: bool = True
    seconds: float | None = None  # None unless the result is right
    limit_s: float | None = None
    limit: str = ""  # memory or products
    times_faster: float | None = None  # the time of this system / Orca's
    has_gap: bool = False  # the row is about steps, so it may have a host gap
    host_gap_s: float | None = None  # between two steps
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


def said(error: Exception) -> str:
    """Return an error as a short text of one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:100]
