"""The layouts that were found to be the fastest (layout_choice.py), kept from one start to the next: timing them takes
longer than reading the weights.

Each choice is a small file beside the compiled kernels of this processor, and its name contains all else that the
choice depends on. If nothing can be kept, each start times the layouts again.
"""

import hashlib
import inspect
import logging
import os
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from orca.core.process.whole_file import write_whole
from orca.worker.weights import layout_choice, linear
from orca.worker.weights.layout_choice import LAYOUTS, ChooseLayout, Layouts, fastest_layout, shape_name
from orca.worker.weights.linear import Linear

log = logging.getLogger(__name__)


def remembered_layout(
    weight: Tensor,
    bias: Tensor | None,
    choose: ChooseLayout | None = None,
    *,
    dtype: torch.dtype | None = None,
    layouts: Layouts = LAYOUTS,
    is_together: bool = False,
) -> type[Linear]:
    """Return the layout that an earlier start chose for a weight of this shape; if none has, choose one and keep it.

    Args:
        choose: the function that chooses; None: `fastest_layout`.
        dtype, layouts, is_together: as those of `fastest_layout`.
    """
    choose = choose or partial(fastest_layout, dtype=dtype, layouts=layouts, is_together=is_together)
    name = shape_name(weight, dtype or weight.dtype)
    file = _file(name, layouts, is_together=is_together)
    if file is None:
        return choose(weight, bias)
    kind = _read(file, layouts)
    if kind is None:
        kind = _confirmed(weight, bias, choose)
        _write(file, kind)
    else:
        log.info("weight %s: %s, found by an earlier start: %s", name, kind.__name__, file)
    return kind


def _confirmed(weight: Tensor, bias: Tensor | None, choose: ChooseLayout) -> type[Linear]:
    """Return the layout that wins two of three times: it is kept for long, and other processes may disturb a timing."""
    first = choose(weight, bias)
    return first if choose(weight, bias) is first else choose(weight, bias)


def _file(shape: str, layouts: Layouts, *, is_together: bool) -> Path | None:
    # Numba takes a quarter of a second to import, which other devices need not wait for.
    from orca.kernels.cpu.team.code import cache_folder

    kept_in = cache_folder()
    if kept_in is None:
        return None
    name = f"{shape.replace(' ', '-')}-{_conditions(torch.get_num_threads(), layouts)}"
    return kept_in / "layouts" / (f"{name}-together" if is_together else name)


@cache
def _conditions(threads: int, layouts: Layouts) -> str:
    """Return a hash of everything but the shape that the times depend on, as a few letters."""
    spins = os.environ.get("GOMP_SPINCOUNT", "")  # how long PyTorch's threads are in the way of ours
    on = hashlib.sha256(f"{torch.__version__} {threads} {spins} {_processor()}".encode())
    for file in (linear.__file__, layout_choice.__file__, inspect.getfile(layouts.first)):
        on.update(Path(file).read_bytes())
    return on.hexdigest()[:16]


def _processor() -> str:
    """Return the processor's name: one architecture has many, with different caches and speeds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")


def _read(file: Path, layouts: Layouts) -> type[Linear] | None:
    """Return the layout that a file names; None if there is no file, or it names none."""
    try:
        name = file.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return next((kind for kind in layouts.kinds if kind.__name__ == name), None)


def _write(file: Path, kind: type[Linear]) -> None:
    """Write the file; another rank may read it at the same time."""
    try:
        file.parent.mkdir(exist_ok=True)
        write_whole(file, kind.__name__.encode())
    except OSError as error:
        log.warning("the layout of a weight is not kept, the next start times it again: %s", error)
