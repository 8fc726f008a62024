"""Orca's images, by docker where one answers, else by buildah on a base of Debian's own packages: no registry."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.machine.cache import cache_folder, check_space
from cluster.machine.commands import run
from cluster.machine.debian import IMAGE_COMMANDS, install, missing_packages
from cluster.machine.errors import ClusterError

TAG = "dev"
"""Of images that nobody publishes."""
ROLES = ("gateway", "scheduler", "operator", "fetch", "pool", "worker")
"""Targets of the Containerfile, the quick ones first."""
CHECKOUT = Path(__file__).parents[3]
CONTAINERFILE = "services/Containerfile"

_BASE = "localhost/orca-base:bookworm"
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"
_SPACE_GB = {"worker": 18.0}
"""While its layer of 5 GB is made; it is unpacked, then committed. Others need little."""
_LITTLE_SPACE_GB = 2.0
_CERTIFICATES = Path("/etc/ssl/certs")
_BUILD_WITHIN_S = 1800.0


@dataclass(frozen=True, slots=True)
class Builder:
    """What builds images here: docker or buildah, which take nearly the same words."""

    program: str
    environment: tuple[tuple[str, str], ...] = ()

    def build_command(self, role: str, image: str) -> list[str]:
        words = [*_commit_words(), "--file", CONTAINERFILE, "--target", role, "--tag", image, "."]
        if self.program == "docker":
            return ["docker", "build", *words]
        # A machine's own certificates and uv's cache are seen while an image is built, and are no part of it.
        seen = [f"{_CERTIFICATES}:{_CERTIFICATES}:ro", f"{_uv_cache()}:/root/.cache/uv"]
        volumes = [word for volume in seen for word in ("--volume", volume)]
        return ["buildah", "build", "--layers", "--build-arg", f"BASE={_BASE}", *volumes, *words]

    def export_command(self, image: str) -> list[str]:
        """Writes the image to standard output, as `docker save` does."""
        if self.program == "docker":
            return ["docker", "save", image]
        return ["buildah", "push", "--quiet", image, f"docker-archive:/dev/stdout:{image}"]

    def image_id(self, image: str) -> str:
        """Raises: ClusterError when there is no such image."""
        if self.program == "docker":
            return self.run("image", "inspect", "--format", "{{.Id}}", image)
        return self.run("inspect", "--type", "image", "--format", "{{.FromImageID}}", image)

    def layers(self, image: str) -> list[str]:
        """Diff ids, the lowest first. Of docker's images none are told: it exports them in another order."""
        if self.program == "docker":
            return []
        said = self.run("inspect", "--type", "image", "--format", "{{.OCIv1.RootFS.DiffIDs}}", image)
        return re.findall(r"sha256:[0-9a-f]{64}", said)

    def run(self, *words: str | Path, folder: Path | None = None) -> str:
        """Raises: ClusterError with what it said."""
        return run(
            self.program, *words, environment=dict(self.environment), folder=folder, within_s=_BUILD_WITHIN_S
        ).strip()


# Without the rights that a container of CI lacks, buildah runs steps in a plain chroot.
BUILDAH = Builder("buildah", (("STORAGE_DRIVER", "overlay"), ("BUILDAH_ISOLATION", "chroot")))
DOCKER = Builder("docker")


def image_of(role: str, tag: str) -> str:
    return f"localhost/orca-{role}:{tag}"


def builder_here() -> Builder:
    """docker when its daemon answers, else buildah, whether it is installed yet or not."""
    if shutil.which("docker") is None:
        return BUILDAH
    answered = subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
    return DOCKER if answered else BUILDAH


def build_images(roles: Sequence[str], tag: str, tell: Callable[[str], None]) -> None:
    """Build `localhost/orca-<role>:<tag>` of each role from this checkout.

    Layers that are there already are used again: of a change in our code alone, seconds.

    Raises: ClusterError without buildah and the right to install it, without space, or with what a step said.
    """
    builder = builder_here()
    if builder is BUILDAH:
        install(missing_packages(IMAGE_COMMANDS, files={}), tell)
        _make_base(tell)
    for role in roles:
        check_space(_storage(), wanted_gb=_SPACE_GB.get(role, _LITTLE_SPACE_GB), purpose=f"the image of a {role}")
        begun = time.monotonic()
        builder.run(*builder.build_command(role, image_of(role, tag))[1:], folder=CHECKOUT)
        tell(f"built {image_of(role, tag)} in {time.monotonic() - begun:.0f} s")


def _make_base(tell: Callable[[str], None]) -> None:
    """Debian with Python, from its packages, in place of the public Python image; once for all builds."""
    if _BASE in BUILDAH.run("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        return
    if os.geteuid() != 0:
        raise ClusterError("not root, so no base image can be made: it is unpacked with its owners")
    tell(f"making {_BASE} from Debian's packages")
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="base-", dir=cache_folder()) as folder:
        root = Path(folder) / "root"
        run("debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", "bookworm", root, within_s=900)
        for passing in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(root / passing)
        container = BUILDAH.run("from", "scratch")
        try:
            BUILDAH.run("add", "--quiet", container, root, "/")
            BUILDAH.run("commit", "--quiet", container, _BASE)
        finally:
            BUILDAH.run("rm", container)


def _commit_words() -> list[str]:
    """Tell the build which commit this is, where git knows: `orca --version` in an image prints it."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return []
    return ["--build-arg", f"COMMIT={commit}"]


def _uv_cache() -> Path:
    folder = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _storage() -> Path:
    """Where images are kept, or a folder on the same disk."""
    return Path("/var/lib")
