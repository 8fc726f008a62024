"""`orca profile --model DIR --out FILE` measures how long the parts of a model take on this machine.

The planner computes the time of any step from the file, on any number of stages and ranks that was measured.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from orca.cli.model_folder import find_model
from orca.core.domain.errors import ModelError, OrcaError, SettingError
from orca.core.process.settings import check_bounds, read_settings, require, required, setting
from orca.core.process.whole_file import write_whole
from orca.planner.profile.profile import to_json
from orca.planner.profile.profile_table import lines
from orca.worker.machine import available_processors
from orca.worker.settings import DEVICES, dtype_setting, quantization_setting

PREFIX = "ORCA_PROFILE_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """The options of `orca profile`."""

    model: str = required("model folder, owner/name on the hub, or a model that ships with Orca, as for orca up")
    out: str = required("file for the profile; an existing one is replaced when all is measured")
    devices: int = setting(
        1,
        "devices that the planned service will have: so many ranks are measured at the same time, because they share"
        " memory and processors; on cuda they are GPUs",
        least=1,
    )
    ranks: tuple[str, ...] = setting(
        (),
        "numbers of ranks in a stage to measure, comma-separated, such as 1,2; unset: the powers of two up to devices",
    )
    threads: int = setting(0, "computing threads of each rank; 0 divides the processors among the devices", least=0)
    minutes: float = setting(5.0, "time to measure for; with less time, long steps are left out", least=0.001)
    dtype: str = dtype_setting()
    quantization: str | None = quantization_setting()
    device: str = setting("cpu", "device to measure", choices=DEVICES)
    host: bool = setting(
        True,
        "measure also what gateway, scheduler and Redis take from the processors, if ranks compute on all of them:"
        " a whole Orca runs the model for some seconds; false for stages that have a machine of their own",
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        require(self.quantization is None or self.device == "cpu", self, "quantization", "for the device cuda")
        require(all(_is_count(each) for each in self.ranks), self, "ranks", "a list of numbers from 1 on, such as 1,2")

    @property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of ranks to measure, rising."""
        if self.ranks:
            return tuple(sorted({int(each) for each in self.ranks}))
        return tuple(1 << power for power in range(self.devices.bit_length()))

    @property
    def threads_per_rank(self) -> int:
        return self.threads or max(1, available_processors() // self.devices)


def main(argv: Sequence[str]) -> int:
    """Measure a model and write its profile.

    Returns: 0; 1 if a measuring process failed. Raises: SettingError, ModelError.
    """
    settings = parse_settings(argv, os.environ)
    out = Path(settings.out)
    _check_out(out)
    folder, _ = find_model(settings.model)
    from orca.cli.whole_profile import measure_whole  # torch, which --help does not need
    from orca.planner.profile.measuring.measure import MeasurePlan

    plan = MeasurePlan(
        model=folder,
        dtype=settings.dtype,
        quantization=settings.quantization,
        device=settings.device,
        threads=settings.threads_per_rank,
        devices=settings.devices,
        ranks=settings.degrees,
        minutes=settings.minutes,
        release=version("orca-serving"),
    )
    try:
        profile = measure_whole(plan, _report, host=settings.host)
    except (SettingError, ModelError):
        raise
    except OrcaError as error:
        print(f"orca profile: {error}", file=sys.stderr)
        return 1
    write_whole(out, to_json(profile))
    print("\n".join(lines(profile)))
    return 0


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> ProfileSettings:
    """Read the settings. Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        ProfileSettings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca profile",
        description="Measure how long the parts of a model take on this machine, for the planner.",
    )


def _check_out(out: Path) -> None:
    """Raises: SettingError if the file cannot be written: better now than after minutes."""
    if out.is_dir():
        raise SettingError(f"--out {out} is a folder: give a file")
    if not out.parent.is_dir():
        raise SettingError(f"--out {out}: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise SettingError(f"--out {out}: files cannot be written to {out.parent}")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _report(text: str) -> None:
    print(f"orca profile: {text}", file=sys.stderr, flush=True)
