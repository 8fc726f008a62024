"""The engine's parts of `python -m orca.bench.kernels`, which finds this module by its name."""

from collections.abc import Mapping

from orca.bench.gpu.decode import decode_rows
from orca.bench.gpu.paper_trace import trace_rows
from orca.bench.kernels.engine import Part

PARTS: Mapping[str, Part] = {"decode": decode_rows, "trace": trace_rows}
