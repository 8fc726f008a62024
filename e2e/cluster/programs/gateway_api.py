"""The definitions of the Gateway API, `HTTPRoute` among them, out of the pinned Go module that holds them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from cluster.machine.cache import cache_folder, cached, key_of
from cluster.machine.commands import run
from cluster.programs.go_programs import GO_FOLDER, go_caches, go_environment

_SOURCE = GO_FOLDER / "gateway-api"
_MODULE = "sigs.k8s.io/gateway-api"


def folder() -> Path:
    """Where they are kept; there once they were had."""
    return cache_folder() / f"gateway-api-{key_of(_SOURCE / 'go.mod', _SOURCE / 'go.sum')}"


def definitions(tell: Callable[[str], None]) -> Path:
    """A folder with a CustomResourceDefinition a file. Raises: ClusterError when the module cannot be had."""

    def take(target: Path) -> None:
        tell("downloading the definitions of the Gateway API")
        with go_caches() as caches:
            said = run(
                "go", "mod", "download", "-json", _MODULE, folder=_SOURCE, environment=go_environment(tell) | caches
            )
            found = Path(json.loads(said)["Dir"]) / "config" / "crd" / "standard"
            for file in found.glob("gateway.networking.k8s.io_*.yaml"):
                shutil.copyfile(file, target / file.name)

    cached(folder(), take)
    return folder()
