"""Writes images of static programs without a builder: an OCI archive is a tar file with JSON files.

oci-layout                    marks the archive as one
index.json                    -> manifest, with the image's name
blobs/sha256/<digest>         manifest -> config, layer;   config;   layer: a tar file of the files
"""

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.machine.cache import build_once, cache_folder, content_key
from cluster.machine.commands import run
from cluster.programs.go_programs import COREDNS, FETCH, LOCAL_PATH, TRAEFIK, Program

TOOLBOX = "localhost/orca/toolbox:1"
"""busybox and `fetch` for pods of tests. It sleeps by default, so it also serves as the sandbox image of pods."""
BUSYBOX = Path("/bin/busybox")
UNPRIVILEGED_USER = 65532


@dataclass(frozen=True, slots=True)
class ScratchImage:
    """An image of static binaries of this machine, each as `/bin/<its name>`.

    Fields:
        links: other names of the first binary.
        entry: the entry point of a container; a pod's `command` replaces it.
        arguments: the arguments of the entry point; a pod's `args` replace them.
    """

    name: str
    programs: tuple[Path, ...]
    entry: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def archive(self) -> Path:
        """Its path in the cache."""
        key = content_key(self.name, repr((self.entry, self.arguments, self.links)), *self.programs)
        return cache_folder() / "images" / f"{self.programs[0].name}-{key}" / "image.tar"

    def write_archive(self) -> Path:
        """Write the archive if it does not exist yet, and return its path."""
        archive = self.archive
        build_once(archive.parent, lambda folder: _write_archive(self, folder / archive.name))
        return archive


def toolbox_image() -> ScratchImage:
    names = tuple(run(BUSYBOX, "--list").split())
    return ScratchImage(TOOLBOX, (BUSYBOX, FETCH.path), arguments=("/bin/sleep", "infinity"), links=names)


def program_image(program: Program) -> ScratchImage:
    return ScratchImage(image_name(program), (program.path,), entry=(f"/bin/{program.name}",))


def image_name(program: Program) -> str:
    return f"localhost/orca/{program.name}:{program.version}"


def service_images() -> list[ScratchImage]:
    """Return the images of the cluster's own services, which run on the first node."""
    return [program_image(program) for program in (COREDNS, TRAEFIK, LOCAL_PATH)]


def _write_archive(image: ScratchImage, target: Path) -> None:
    layer = target.with_name("layer.tar")
    _write_layer(image, layer)
    layer_digest = _digest_of_file(layer)
    config = as_json(_config(image, layer_digest))
    manifest = as_json(_manifest(config, layer_digest, layer.stat().st_size))
    entry = descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": image.name, "org.opencontainers.image.ref.name": image.name}
    with tarfile.open(target, "w") as archive:
        add_bytes(archive, "oci-layout", as_json({"imageLayoutVersion": "1.0.0"}))
        add_bytes(archive, "index.json", as_json({"schemaVersion": 2, "manifests": [entry]}))
        for blob in (config, manifest):
            add_bytes(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
        archive.add(layer, f"blobs/sha256/{layer_digest}")
    layer.unlink()


def _write_layer(image: ScratchImage, target: Path) -> None:
    with tarfile.open(target, "w") as layer:
        for folder, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            _add(layer, folder, kind=tarfile.DIRTYPE, mode=mode)
        users = f"root:x:0:0:root:/:/bin/sh\nnobody:x:{UNPRIVILEGED_USER}:{UNPRIVILEGED_USER}:nobody:/:/bin/sh\n"
        add_bytes(layer, "etc/passwd", users.encode())
        for program in image.programs:
            layer.add(program.resolve(), f"bin/{program.name}", filter=_owned_by_root)
        first = image.programs[0].name
        for link in sorted(set(image.links) - {first}):
            _add(layer, f"bin/{link}", kind=tarfile.SYMTYPE, mode=0o777, target=first)


def _config(image: ScratchImage, layer_digest: str) -> dict[str, Any]:
    return {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": list(image.entry),
            "Cmd": list(image.arguments),
            "Env": ["PATH=/bin"],
            "User": f"{UNPRIVILEGED_USER}:{UNPRIVILEGED_USER}",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
    }


def _manifest(config: bytes, layer_digest: str, layer_bytes: int) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", config),
        "layers": [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": f"sha256:{layer_digest}",
                "size": layer_bytes,
            }
        ],
    }


def descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}


def as_json(content: Any) -> bytes:
    return json.dumps(content).encode()


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add(archive: tarfile.TarFile, name: str, *, kind: bytes, mode: int, target: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname = kind, mode, target
    archive.addfile(entry)


def add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755
    return entry
