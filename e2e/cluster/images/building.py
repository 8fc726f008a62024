"""Builds Orca's images without a registry: with docker if it runs, otherwise with buildah on a Debian base."""

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
"""Tag of images that are not published."""
ROLES = ("gateway", "scheduler", "operator", "fetch", "pool", "worker")
"""Targets of the Containerfile, the fastest builds first."""
CHECKOUT = Path(__file__).parents[3]
CONTAINERFILE = "services/Containerfile"

_BASE = "localhost/orca-base:bookworm"
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"
_SPACE_GB = {"worker": 18.0}
"""Space for its layer of 5 GB, which is unpacked and then committed. The other roles need little."""
_LITTLE_SPACE_GB = 2.0
_CERTIFICATES = Path("/etc/ssl/certs")
_BUILD_WITHIN_S = 1800.0


@dataclass(frozen=True, slots=True)
class Builder:
    """The builder of images: docker or buildah, which take nearly the same arguments."""

    program: str
    environment: tuple[tuple[str, str], ...] = ()

    def build_command(self, role: str, image: str) -> list[str]:
        words = [*_commit_words(), "--file", CONTAINERFILE, "--target", role, "--tag", image, "."]
        if self.program == "docker":
            return ["docker", "build", *words]
        # The machine's certificates and uv's cache are mounted during the build, and are not part of the image.
        seen = [f"{_CERTIFICATES}:{_CERTIFICATES}:ro", f"{_uv_cache()}:/root/.cache/uv"]
        volumes = [word for volume in seen for word in ("--volume", volume)]
        return ["buildah", "build", "--layers", "--build-arg", f"BASE={_BASE}", *volumes, *words]

    def export_command(self, image: str) -> list[str]:
        """Return the command that writes the image to standard output, like `docker save`."""
        if self.program == "docker":
            return ["docker", "save", image]
        return ["buildah", "push", "--quiet", image, f"docker-archive:/dev/stdout:{image}"]

    def image_id(self, image: str) -> str:
        """Return the id of an image. Raises: ClusterError if there is no such image."""
        if self.program == "docker":
            return self.run("image", "inspect", "--format", "{{.Id}}", image)
        return self.run("inspect", "--type", "image", "--format", "{{.FromImageID}}", image)

    def layers(self, image: str) -> list[str]:
        """Return the diff ids of an image, the lowest first; none for docker, which exports them in another order."""
        if self.program == "docker":
            return []
        output = self.run("inspect", "--type", "image", "--format", "{{.OCIv1.RootFS.DiffIDs}}", image)
        return re.findall(r"sha256:[0-9a-f]{64}", output)

    def run(self, *words: str | Path, folder: Path | None = None) -> str:
        """Run a command of the builder. Raises: ClusterError with its output."""
        return run(
            self.program, *words, environment=dict(self.environment), folder=folder, within_s=_BUILD_WITHIN_S
        ).strip()


# With chroot isolation, buildah needs no rights that a CI container does not have.
BUILDAH = Builder("buildah", (("STORAGE_DRIVER", "overlay"), ("BUILDAH_ISOLATION", "chroot")))
DOCKER = Builder("docker")


def orca_image(role: str, tag: str) -> str:
    return f"localhost/orca-{role}:{tag}"


def find_builder() -> Builder:
    """Return docker if its daemon answers, otherwise buildah, which may not be installed yet."""
    if shutil.which("docker") is None:
        return BUILDAH
    answered = subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
    return DOCKER if answered else BUILDAH


def build_images(roles: Sequence[str], tag: str, report: Callable[[str], None]) -> None:
    """Build `localhost/orca-<role>:<tag>` of each role from this checkout.

    Existing layers are used again, so that after a change in Orca's code alone a build takes seconds.

    Raises: ClusterError without buildah and the right to install it, without space, or with the output of a step.
    """
    builder = find_builder()
    if builder is BUILDAH:
        install(missing_packages(IMAGE_COMMANDS, files={}), report)
        _make_base(report)
    for role in roles:
        check_space(_storage(), wanted_gb=_SPACE_GB.get(role, _LITTLE_SPACE_GB), purpose=f"the image of a {role}")
        begun = time.monotonic()
        builder.run(*builder.build_command(role, orca_image(role, tag))[1:], folder=CHECKOUT)
        report(f"built {orca_image(role, tag)} in {time.monotonic() - begun:.0f} s")


def _make_base(report: Callable[[str], None]) -> None:
    """Make a base image with Python from Debian's packages, in place of the public Python image, if there is none."""
    if _BASE in BUILDAH.run("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        return
    if os.geteuid() != 0:
        raise ClusterError("not root, so the base image cannot be made: its files need their owners")
    report(f"making {_BASE} from Debian's packages")
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
    """Return the build argument with the commit, if git knows it: `orca --version` in an image prints it."""
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
    """Return a folder on the disk of the image store."""
    return Path("/var/lib")
