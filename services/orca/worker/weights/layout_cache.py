"""The layouts that were found to be the fastest (linear.py), kept from one start to the next: timing them takes longer
than reading the weights.

Each is a small file beside the compiled kernels of this processor, and its name has all else that the choice depends
on. Where nothing can be kept, each start times anew.
"""

import hashlib
import inspect
import logging
import os
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from orca.worker.weights import linear
from orca.worker.weights.linear import LAYOUTS, Choose, Layouts, Linear, fastest, shape_name

log = logging.getLogger(__name__)


def remembered(
    weight: Tensor,
    bias: Tensor | None,
    choose: Choose | None = None,
    *,
    dtype: torch.dtype | None = None,
    layouts: Layouts = LAYOUTS,
    is_together: bool = False,
) -> type[Linear]:
    """What `choose`, or `fastest`, finds for a weight of this shape, which is asked only where no earlier start has."""
    choose = choose or partial(fastest, dtype=dtype, layouts=layouts, is_together=is_together)
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


def _confirmed(weight: Tensor, bias: Tensor | None, choose: Choose) -> type[Linear]:
    """What wins two of three times: it is kept for long, and other processes may have been in the way once."""
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
    """What times depend on besides the shape, as a few letters."""
    spins = os.environ.get("GOMP_SPINCOUNT", "")  # how long PyTorch's threads are in the way of ours
    on = hashlib.sha256(f"{torch.__version__} {threads} {spins} {_processor()}".encode())
    on.update(Path(linear.__file__).read_bytes())
    on.update(Path(inspect.getfile(layouts.first)).read_bytes())
    return on.hexdigest()[:16]


def _processor() -> str:
    """Its name: of one architecture there are many, with other caches and speeds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")


def _read(file: Path, layouts: Layouts) -> type[Linear] | None:
    """None where there is no file, or none that names a layout."""
    try:
        name = file.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return next((kind for kind in layouts.kinds if kind.__name__ == name), None)


def _write(file: Path, kind: type[Linear]) -> None:
    """Whole or not at all: another rank may read it at the same time."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(exist_ok=True)
        new.write_text(kind.__name__)
        new.replace(file)
    except OSError as error:
        log.warning("the layout of a weight is not kept, the next start times it again: %s", error)
