"""Measures a profile with `orca profile` in a process of its own, which gives back all memory when it ends."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from orca.core.domain.errors import OrcaError
from orca.core.process.parent_death import die_with_parent
from orca.planner.profile.profile import Profile, ProfileKey, read_profile

MINUTES = 5.0
"""Most minutes of a measurement, about."""

_PREFIX = "orca profile: "
_COMMAND = (sys.executable, "-m", "orca.cli.main", "profile")


class MeasuringFailed(OrcaError):
    """A model could not be measured; the message says why."""


Measure = Callable[[Path, ProfileKey, Callable[[str], None]], Profile]
"""Measures the model in a folder for a key, and reports its progress. Raises: MeasuringFailed."""


def measure_apart(
    model: Path, key: ProfileKey, report: Callable[[str], None], *, command: Sequence[str] = _COMMAND
) -> Profile:
    """Measure a model on this machine.

    Args:
        key: says what to measure.
        report: called with a line of progress now and then.
        command: the command to run, before its options.
    Raises: MeasuringFailed with the last words of the process, or if it measured something else.
    """
    with TemporaryDirectory(prefix="orca-slo-") as folder:
        out = Path(folder) / "profile.json"
        code, last = _run([*command, *_options(model, key, out)], report)
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise MeasuringFailed(f"the model could not be measured: {last or f'the process ended with {how}'}")
        try:
            profile = read_profile(out)
            profile.check_key(key)
        except OrcaError as error:
            raise MeasuringFailed(f"the model could not be measured: {error}") from error
        return profile


def _options(model: Path, key: ProfileKey, out: Path) -> list[str]:
    values = {
        "model": model,
        "out": out,
        "devices": key.devices,
        "ranks": ",".join(map(str, key.ranks)),
        "threads": key.threads,
        "minutes": MINUTES,
        "dtype": key.dtype,
        "device": key.device,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return words if key.quantization is None else [*words, "--quantization", key.quantization]


def _run(command: Sequence[str], report: Callable[[str], None]) -> tuple[int, str]:
    """Run the command until it ends. Returns: its exit code, and the last line of its errors."""
    last = ""
    with subprocess.Popen(
        die_with_parent(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C reaches this process alone, which then ends the other one.
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                last = line.strip().removeprefix(_PREFIX) or last
                if line.startswith(_PREFIX):
                    report(last)
            return process.wait(), last
        finally:
            process.kill()
