"""An image on its way from buildah to a container runtime, without the layers that the runtime has unpacked already.

in    <diff id>.tar ...  <config digest>.json  manifest.json  ...   as `docker save` wrote for years and buildah does
out   blobs/sha256/<digest> ...  index.json  oci-layout                as OCI has it; a layer that is kept is named only

A runtime that has a layer unpacked never asks for its content, and a worker's weigh 5 GB.
"""

import hashlib
import tarfile
from collections.abc import Collection, Sequence
from typing import IO

from cluster.images.scratch import add_bytes, as_json, descriptor

_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """By which runtimes know unpacked layers: each is what lies on all those below it (OCI image spec, layer chain)."""
    chain: list[str] = []
    for diff_id in diff_ids:
        below = f"{chain[-1]} {diff_id}".encode() if chain else None
        chain.append(diff_id if below is None else f"sha256:{hashlib.sha256(below).hexdigest()}")
    return chain


def without_layers(
    source: IO[bytes], target: IO[bytes], image: str, diff_ids: Sequence[str], kept: Collection[str]
) -> None:
    """
    Args:
        image: the name that it gets.
        diff_ids: of its layers, the lowest first.
        kept: those of them that are left out.
    Raises: KeyError when a layer is not in the source; tarfile.ReadError when that ends too soon.
    """
    sizes: dict[str, int] = {}
    config = b""
    with (
        tarfile.open(fileobj=source, mode="r|", bufsize=1 << 20) as docker,
        tarfile.open(fileobj=target, mode="w|") as oci,
    ):
        for member in docker:
            name, _, kind = member.name.rpartition(".")
            content = docker.extractfile(member) if member.isfile() and "/" not in name else None
            if content is None:
                continue
            if kind == "tar":
                diff_id = f"sha256:{name}"
                sizes[diff_id] = member.size
                if diff_id not in kept:
                    member.name = f"blobs/sha256/{name}"
                    oci.addfile(member, content)
            elif kind == "json" and name != "manifest":
                config = content.read()
        layers = [{"mediaType": _LAYER, "digest": diff_id, "size": sizes[diff_id]} for diff_id in diff_ids]
        of_config = descriptor(_CONFIG, config)
        manifest = as_json({"schemaVersion": 2, "mediaType": _MANIFEST, "config": of_config, "layers": layers})
        entry = descriptor(_MANIFEST, manifest) | {"annotations": {"io.containerd.image.name": image}}
        for blob in (config, manifest):
            add_bytes(oci, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        add_bytes(oci, "index.json", as_json({"schemaVersion": 2, "manifests": [entry]}))
        add_bytes(oci, "oci-layout", as_json({"imageLayoutVersion": "1.0.0"}))
