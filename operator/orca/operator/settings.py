"""The settings of the operator: `--resync-seconds 60` or `ORCA_OPERATOR_RESYNC_SECONDS=60` (see core.settings)."""

import dataclasses
from collections.abc import Mapping, Sequence

from orca.core.settings import (
    check_bounds,
    is_address,
    log_format_setting,
    log_level_setting,
    read_settings,
    require,
    required,
    setting,
)
from orca.operator.plan import Release

PREFIX = "ORCA_OPERATOR_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that an operator process is told at start."""

    image_gateway: str = required("image of the gateways")
    image_scheduler: str = required("image of the schedulers")
    image_worker: str = required("image of the stage pods")
    image_pool: str = required("image of the pool's Redis")
    image_fetch: str = required("image of the Jobs that fetch models")
    namespaces: tuple[str, ...] = setting(
        (), "namespaces whose resources are served, parted by commas; unset serves the whole cluster"
    )
    listen: str = setting("127.0.0.1:8080", "host:port of /health and /metrics; port 0 takes a free one")
    network_policies: bool = setting(
        False, "give each resource NetworkPolicies: its parts reach each other and no more"
    )
    resync_seconds: float = setting(
        30.0, "each resource is looked at again after so long, though nothing was heard of it", least=0.1
    )
    workers: int = setting(4, "resources that are worked on at a time", least=1)
    log_format: str = log_format_setting()
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        check_bounds(self)
        require(is_address(self.listen), self, "listen", "host:port")

    @property
    def release(self) -> Release:
        return Release(
            gateway=self.image_gateway,
            scheduler=self.image_scheduler,
            worker=self.image_worker,
            pool=self.image_pool,
            fetch=self.image_fetch,
            has_network_policies=self.network_policies,
        )


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        Settings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca operator",
        description="Keep what runs in the cluster equal to its OrcaDeployments.",
    )
