"""The engine's parts of `python -m orca.kernels.bench`, which finds this module by its name."""

from collections.abc import Mapping

from orca.cli.bench.gpu.decode import decode_rows
from orca.cli.bench.gpu.paper_trace import trace_rows
from orca.kernels.bench.engine import Part

PARTS: Mapping[str, Part] = {"decode": decode_rows, "trace": trace_rows}
