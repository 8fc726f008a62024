"""`orca profile --model DIR --out FILE` measures how long the parts of a model take on this machine.

The planner computes the time of any step from the file, on any number of stages and ranks that was measured.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from orca.cli.job_result import ResultSettings, keep_result
from orca.cli.model_folder import find_model
from orca.core.domain.errors import ModelError, OrcaError, SettingError
from orca.core.job_files import PROFILE_FILE
from orca.core.process.settings import check_bounds, read_settings, require, required, setting
from orca.core.process.whole_file import write_whole
from orca.planner.profile.profile import to_json
from orca.planner.profile.profile_table import lines
from orca.worker.machine import available_processors
from orca.worker.settings import DEVICES, dtype_setting, quantization_setting

PREFIX = "ORCA_PROFILE_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings(ResultSettings):
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
        "numbers of ranks in a stage to measure, comma-separated, such as 1,2; unset: the powers of two up to devices,"
        " but not more than the model has attention heads",
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
        # super() does not find the class of a dataclass with slots.
        ResultSettings.__post_init__(self)
        check_bounds(self)
        require(self.quantization is None or self.device == "cpu", self, "quantization", "for the device cuda")
        require(all(_is_count(each) for each in self.ranks), self, "ranks", "a list of numbers from 1 on, such as 1,2")

    def degrees(self, heads: int) -> tuple[int, ...]:
        """Return the numbers of ranks to measure, rising. Args: heads: the fewest of a stack, which ranks divide."""
        if self.ranks:
            return tuple(sorted({int(each) for each in self.ranks}))
        return tuple(1 << power for power in range(min(self.devices, heads).bit_length()))

    @property
    def threads_per_rank(self) -> int:
        return self.threads or max(1, available_processors() // self.devices)


def main(argv: Sequence[str]) -> int:
    """Measure a model and write its profile.

    Returns: 0; 1 if a measuring process failed, or if the pool does not take the profile.
    Raises: SettingError, ModelError.
    """
    settings = parse_settings(argv, os.environ)
    out = Path(settings.out)
    _check_out(out)
    folder, _ = find_model(settings.model)
    from orca.cli.whole_profile import measure_whole  # torch, which --help does not need
    from orca.planner.profile.measuring.measure import MeasurePlan
    from orca.planner.profile.measuring.model_key import fewest_heads

    plan = MeasurePlan(
        model=folder,
        dtype=settings.dtype,
        quantization=settings.quantization,
        device=settings.device,
        threads=settings.threads_per_rank,
        devices=settings.devices,
        ranks=settings.degrees(fewest_heads(folder)),
        minutes=settings.minutes,
        release=version("orca-serving"),
    )
    try:
        profile = measure_whole(plan, _report, host=settings.host)
        found = to_json(profile)
        write_whole(out, found)
        print("\n".join(lines(profile)), flush=True)
        keep_result(settings, {PROFILE_FILE: found.decode()}, os.environ)
    except (SettingError, ModelError):
        raise
    except OrcaError as error:
        print(f"orca profile: {error}", file=sys.stderr)
        return 1
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
