"""The settings of `orca fetch`: `--uri hf://org/name` or `ORCA_FETCH_URI=hf://org/name` (see core.process.settings)."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from orca.core.process.settings import (
    check_bounds,
    is_address,
    log_format_setting,
    log_level_setting,
    read_settings,
    require,
    required,
    setting,
)

PREFIX = "ORCA_FETCH_"
_HUB = re.compile(r"hf://([A-Za-z0-9][\w.-]*/[\w.-]+)", re.ASCII)
_BUCKET = re.compile(r"s3://([a-z0-9][a-z0-9.-]*)/([^/]+(?:/[^/]+)*)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """All options of one fetch."""

    uri: str = required("the model: hf://ORGANISATION/NAME or s3://BUCKET/PATH")
    into: str = required("folder to write the model to; it appears when the model is complete")
    revision: str | None = setting(None, "commit, branch or tag on the hub; default: main")
    listen: str | None = setting(None, "host:port for /health and /progress; default: no port")
    tries: int = setting(
        5, "tries of a file before the fetch fails; a try that receives bytes starts the count again", least=1
    )
    log_format: str = log_format_setting()
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        check_bounds(self)
        is_known = self.repository is not None or self.object_folder is not None
        require(is_known, self, "uri", "hf://ORGANISATION/NAME or s3://BUCKET/PATH")
        is_revised = self.revision is not None and self.repository is None
        require(not is_revised, self, "revision", "allowed with an s3:// uri: its path is the revision")
        require(self.listen is None or is_address(self.listen), self, "listen", "host:port")

    @property
    def repository(self) -> str | None:
        """ORGANISATION/NAME on the hub; None for another kind of uri."""
        found = _HUB.fullmatch(self.uri)
        return found and found[1]

    @property
    def object_folder(self) -> tuple[str, str] | None:
        """Bucket and path in S3; None for another kind of uri."""
        found = _BUCKET.fullmatch(self.uri)
        return found and (found[1], found[2])


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> FetchSettings:
    """Read flags and variables. Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        FetchSettings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca fetch",
        description="Download a model from a hub or an S3 store into a folder. HF_ENDPOINT, HF_TOKEN and the usual AWS"
        " variables, such as AWS_ENDPOINT_URL, set the server and the credentials.",
    )
