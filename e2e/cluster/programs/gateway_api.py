"""The definitions of the Gateway API, such as `HTTPRoute`, from their pinned Go module."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from cluster.machine.cache import build_once, cache_folder, content_key
from cluster.machine.commands import run
from cluster.programs.go_programs import GO_FOLDER, go_caches, go_environment

_SOURCE = GO_FOLDER / "gateway-api"
_MODULE = "sigs.k8s.io/gateway-api"


def folder() -> Path:
    """Return the folder of the definitions in the cache; it exists after the first download."""
    return cache_folder() / f"gateway-api-{content_key(_SOURCE / 'go.mod', _SOURCE / 'go.sum')}"


def definitions(report: Callable[[str], None]) -> Path:
    """Return a folder with one CustomResourceDefinition per file. Raises: ClusterError if the download fails."""

    def take(target: Path) -> None:
        report("downloading the definitions of the Gateway API")
        with go_caches() as caches:
            said = run(
                "go", "mod", "download", "-json", _MODULE, folder=_SOURCE, environment=go_environment(report) | caches
            )
            found = Path(json.loads(said)["Dir"]) / "config" / "crd" / "standard"
            for file in found.glob("gateway.networking.k8s.io_*.yaml"):
                shutil.copyfile(file, target / file.name)

    build_once(folder(), take)
    return folder()
