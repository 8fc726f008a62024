"""The settings of the operator: `--resync-seconds 60` or `ORCA_OPERATOR_RESYNC_SECONDS=60` (see
core.process.settings)."""

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
from orca.operator.domain.observation import Release
from orca.operator.plan.lease import LeaseTerms

PREFIX = "ORCA_OPERATOR_"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """The settings of an operator process."""

    image_gateway: str = required("image of the gateways")
    image_scheduler: str = required("image of the schedulers")
    image_worker: str = required("image of the stage pods")
    image_pool: str = required("image of the pool's Redis")
    image_fetch: str = required("image of the Jobs that fetch models")
    namespaces: tuple[str, ...] = setting(
        (), "namespaces whose OrcaDeployments are served, comma-separated; unset serves the whole cluster"
    )
    listen: str = setting("127.0.0.1:8080", "host:port of /health and /metrics; port 0 takes a free port")
    network_policies: bool = setting(
        False, "give each OrcaDeployment NetworkPolicies: its parts reach each other and nothing else"
    )
    dns_ports: tuple[str, ...] = setting(
        (), "ports of the cluster's DNS that these NetworkPolicies allow, comma-separated; unset allows 53"
    )
    lease: str | None = setting(
        None,
        "name of the Lease by which only one of several operators acts, and of this operator in the status of the"
        " resources that it serves; unset acts at once, without a Lease and a name",
    )
    lease_namespace: str | None = setting(None, "namespace of the Lease; the chart sets the operator's own namespace")
    lease_identity: str | None = setting(
        None, "name of this operator in the Lease, which no other operator uses; the chart sets the pod's name"
    )
    lease_seconds: int = setting(
        15,
        "seconds without a renewal after which another operator takes the Lease; its holder stops at two thirds",
        least=3,
    )
    resync_seconds: float = setting(
        30.0, "seconds after which each OrcaDeployment is reconciled again, though no event named it", least=0.1
    )
    workers: int = setting(4, "OrcaDeployments that are reconciled at the same time", least=1)
    slo_check_seconds: float = setting(
        600.0, "seconds from check to check of a plan for spec.slo on the lengths of now", least=1
    )
    log_format: str = log_format_setting()
    log_level: str = log_level_setting()

    def __post_init__(self) -> None:
        check_bounds(self)
        require(is_address(self.listen), self, "listen", "host:port")
        is_port = all(each.isdecimal() and 1 <= int(each) <= 65_535 for each in self.dns_ports)
        require(is_port, self, "dns_ports", "a comma-separated list of ports from 1 to 65535")
        require(self.lease is None or _NAME.fullmatch(self.lease) is not None, self, "lease", "the name of an object")
        for name in ("lease_namespace", "lease_identity"):
            is_complete = bool(getattr(self, name)) or self.lease is None
            require(is_complete, self, name, "a name, which --lease needs")

    @property
    def lease_terms(self) -> LeaseTerms | None:
        """The terms of the Lease; None if the operator acts without one."""
        if self.lease is None:
            return None
        assert self.lease_namespace is not None
        assert self.lease_identity is not None
        return LeaseTerms(
            namespace=self.lease_namespace,
            name=self.lease,
            identity=self.lease_identity,
            duration_s=self.lease_seconds,
        )

    @property
    def identity(self) -> str | None:
        """The name of this operator, which its pods and later releases share; None if it acts without a Lease."""
        return None if self.lease is None else f"{self.lease_namespace}/{self.lease}"

    @property
    def release(self) -> Release:
        return Release(
            gateway=self.image_gateway,
            scheduler=self.image_scheduler,
            worker=self.image_worker,
            pool=self.image_pool,
            fetch=self.image_fetch,
            has_network_policies=self.network_policies,
            dns_ports=tuple(map(int, self.dns_ports)) or (53,),
            slo_check_s=self.slo_check_seconds,
        )


def parse_settings(argv: Sequence[str], environment: Mapping[str, str]) -> OperatorSettings:
    """Raises: SettingError that names the setting; SystemExit only for --help."""
    return read_settings(
        OperatorSettings,
        argv,
        environment,
        prefix=PREFIX,
        prog="orca operator",
        description="Keep what runs in the cluster equal to its OrcaDeployments.",
    )
