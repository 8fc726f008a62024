"""Converts an image archive from buildah for a container runtime, without the layers that the runtime already has.

in    <diff id>.tar ...  <config digest>.json  manifest.json  ...   the old format of `docker save`, used by buildah
out   blobs/sha256/<digest> ...  index.json  oci-layout             the OCI format; it only names a known layer

A runtime never reads the content of a layer that it has unpacked, and the layers of a worker have 5 GB.
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
    """Return the runtime's ids of unpacked layers: each covers a layer and all layers below it (OCI layer chain)."""
    chain: list[str] = []
    for diff_id in diff_ids:
        below = f"{chain[-1]} {diff_id}".encode() if chain else None
        chain.append(diff_id if below is None else f"sha256:{hashlib.sha256(below).hexdigest()}")
    return chain


def without_layers(
    source: IO[bytes], target: IO[bytes], image: str, diff_ids: Sequence[str], known: Collection[str]
) -> None:
    """Convert an archive and leave out the known layers.

    Args:
        image: name of the image in the new archive.
        diff_ids: of its layers, the lowest first.
        known: the layers to leave out.
    Raises: KeyError if a layer is not in the source; tarfile.ReadError if the source is cut.
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
                if diff_id not in known:
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
