"""Packages from Debian's archive that the machine needs besides the cluster's own programs."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cluster.machine.commands import run
from cluster.machine.errors import ClusterError

COMMANDS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ipset": "ipset",
    "socat": "socat",
    "openssl": "openssl",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
}
"""Command -> its package, for the commands that `up` starts and those that they start."""

IMAGE_COMMANDS = {"buildah": "buildah", "debootstrap": "debootstrap"}
"""The same for the builders of images."""

FILES = {
    Path("/usr/lib/cni/ptp"): "containernetworking-plugins",
    Path("/bin/busybox"): "busybox-static",
}

_START_POLICY = Path("/usr/sbin/policy-rc.d")


def missing_packages(commands: Mapping[str, str], files: Mapping[Path, str] = FILES) -> list[str]:
    """Return the sorted packages of the commands and files that the machine lacks."""
    # Some commands are in folders that are only on root's PATH.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    packages = {package for command, package in commands.items() if shutil.which(command, path=path) is None}
    return sorted(packages | {package for file, package in files.items() if not file.exists()})


def install(packages: list[str], report: Callable[[str], None]) -> None:
    """Install packages. Raises: ClusterError with their names, if this process may not install them."""
    if not packages:
        return
    named = " ".join(packages)
    if os.geteuid() != 0:
        raise ClusterError(f"not root, so these Debian packages cannot be installed: apt-get install {named}")
    if shutil.which("apt-get") is None:
        raise ClusterError(f"there is no apt-get here; install these Debian packages by other means: {named}")
    report(f"installing {named}")
    with _no_service_starts():
        run("apt-get", "update", "-qq", within_s=300)
        install_words = ["apt-get", "install", "-qq", "--no-install-recommends"]
        run(*install_words, *packages, environment={"DEBIAN_FRONTEND": "noninteractive"}, within_s=600)


@contextmanager
def _no_service_starts() -> Iterator[None]:
    """Write the file that keeps Debian from starting the service of a new package: only its binaries are needed."""
    if _START_POLICY.exists():
        yield
        return
    _START_POLICY.write_text("#!/bin/sh\nexit 101\n")
    _START_POLICY.chmod(0o755)
    try:
        yield
    finally:
        _START_POLICY.unlink()
