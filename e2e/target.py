"""Which cluster the scenarios run on: the one that `make e2e` starts, or one that is named by $ORCA_E2E_CONTEXT: pure.

Nothing is taken from a kubeconfig's current context: what is not named is not touched.
"""

import dataclasses
from collections.abc import Mapping

from cluster.machine.layout import INGRESS_ADDRESS
from orca.core.process.settings import read_variables, require, setting

PREFIX = "ORCA_E2E_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment says. A cluster that is not ours has to be told with all that the scenarios need of it."""

    context: str = setting("", "context of the kubeconfig; unset runs on the cluster that `make e2e` starts")
    registry: str = setting("", "where its nodes pull Orca's images from, such as registry.example.com/orca")
    tag: str = setting("", "of these images")
    ingress_class: str = setting("", "by which an Ingress is served")
    ingress_address: str = setting("", "host or host:port where that answers plain HTTP, as seen from here")
    figures: str = setting("", "file that gets a JSON object per scenario; unset takes one in the cache folder")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in ("context", "figures"):
                continue
            is_given = bool(getattr(self, field.name))
            require(is_given or not self.context, self, field.name, f"given: {field.metadata['help']}")
            require(bool(self.context) or not is_given, self, field.name, f"of use without {PREFIX}CONTEXT")
        require("/" not in self.ingress_address, self, "ingress_address", "host or host:port")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster, as far as scenarios know it."""

    context: str | None  # None for the cluster of `make e2e`
    registry: str
    tag: str
    ingress_class: str
    ingress_address: str
    operator_namespace: str

    @property
    def is_ours(self) -> bool:
        return self.context is None


OURS = Target(
    context=None,
    registry="localhost",
    tag="dev",
    ingress_class="traefik",
    ingress_address=INGRESS_ADDRESS,
    operator_namespace="orca-system",
)


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Raises: SettingError that names the variable."""
    return read_variables(Settings, environment, prefix=PREFIX)


def choose(settings: Settings, token: str) -> Target:
    """Args: token: of this run, so that no namespace of somebody's cluster has the name already."""
    if not settings.context:
        return OURS
    return Target(
        context=settings.context,
        registry=settings.registry,
        tag=settings.tag,
        ingress_class=settings.ingress_class,
        ingress_address=settings.ingress_address,
        operator_namespace=f"orca-e2e-{token}",
    )
