"""The cluster of the scenarios: the one that `make e2e` starts, or one that $ORCA_E2E_CONTEXT names. Pure.

A kubeconfig's current context is ignored: the scenarios never use a cluster that is not named.
"""

import dataclasses
from collections.abc import Mapping

from cluster.machine.layout import INGRESS_ADDRESS
from orca.core.process.settings import read_variables, require, setting

PREFIX = "ORCA_E2E_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings in the environment. A foreign cluster needs all of them."""

    context: str = setting("", "context of the kubeconfig; unset: the cluster that `make e2e` starts")
    registry: str = setting("", "registry from which its nodes pull Orca's images, such as registry.example.com/orca")
    tag: str = setting("", "tag of these images")
    ingress_class: str = setting("", "class of an Ingress that the cluster serves")
    ingress_address: str = setting("", "host or host:port of this Ingress for plain HTTP, as seen from here")
    figures: str = setting("", "file for one JSON object per scenario; unset: a file in the cache folder")

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
    """The properties of a cluster that the scenarios need."""

    context: str | None  # None for the cluster of `make e2e`
    registry: str
    tag: str
    ingress_class: str
    ingress_address: str
    operator_namespace: str

    @property
    def is_own(self) -> bool:
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
    """Read the settings. Raises: SettingError, which names the variable."""
    return read_variables(Settings, environment, prefix=PREFIX)


def choose_target(settings: Settings, token: str) -> Target:
    """Return the cluster of the settings. Args: token: of this run, for a namespace that does not exist yet."""
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
