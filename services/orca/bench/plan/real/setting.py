"""A setting of a real group: the options of `orca up` that decide its schedule, and the requests that it holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RealSetting:
    """One way to run the group. Settings with the same flags are the same run, whatever they are called."""

    strategy: str  # name of the policy
    flags: tuple[tuple[str, str], ...]  # names of options of `orca up` without their dashes, and values; names rise
    text: str = field(compare=False)  # for tables
    in_flight: int = field(compare=False)  # requests that the group holds at most

    @staticmethod
    def of(options: Mapping[str, str], text: str, in_flight: int) -> "RealSetting":
        """Return the setting of some options, which name the policy."""
        return RealSetting(options["policy"], tuple(sorted(options.items())), text, in_flight)

    def words(self) -> list[str]:
        """Return the options of `orca up`."""
        return [word for name, value in self.flags for word in (f"--{name.replace('_', '-')}", value)]
