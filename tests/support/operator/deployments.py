"""Builders of OrcaDeployments as the API server would hand them over: the CRD's own defaults filled in."""

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from orca.operator.domain.resource import Json, OrcaDeployment, read

CRD = Path(__file__).parents[3] / "charts/orca/crd/orcadeployments.yaml"
URI = "file:///opt/orca/models/orca-austen"


def deployment(name: str = "shop", generation: int = 1, **spec: Any) -> OrcaDeployment:
    """Args: spec: fields of the spec beside the model; a model given here replaces the default one."""
    return read(body(name, generation, **spec))


def body(name: str = "shop", generation: int = 1, **spec: Any) -> Json:
    """Return the object that the API server stores."""
    metadata = {"name": name, "namespace": "ns", "uid": "uid-1", "generation": generation}
    given = {"model": {"uri": URI}, **spec}
    return {"metadata": metadata, "spec": with_defaults(schema()["properties"]["spec"], given)}


@cache
def schema() -> Json:
    """The OpenAPI schema of the resource."""
    [version] = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    found: Json = version["schema"]["openAPIV3Schema"]
    return found


def with_defaults(of: Mapping[str, Any], value: Any) -> Any:
    """Structural defaulting, as the API server does it: from the outside in."""
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, field in of.get("properties", {}).items():
        if name not in filled and "default" in field:
            filled[name] = copy.deepcopy(field["default"])
        if name in filled:
            filled[name] = with_defaults(field, filled[name])
    return filled
