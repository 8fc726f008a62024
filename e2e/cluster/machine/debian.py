"""What the machine must have besides our own programs, from Debian's archive."""

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
"""Command -> the package that has it: what `up` starts or what those start."""

IMAGE_COMMANDS = {"buildah": "buildah", "debootstrap": "debootstrap"}
"""The same for what builds images."""

FILES = {
    Path("/usr/lib/cni/ptp"): "containernetworking-plugins",
    Path("/bin/busybox"): "busybox-static",
}

_START_POLICY = Path("/usr/sbin/policy-rc.d")


def missing_packages(commands: Mapping[str, str], files: Mapping[Path, str] = FILES) -> list[str]:
    """The packages of those commands and files that the machine lacks, sorted; empty when it has all."""
    # Some of them lie where only root's PATH leads.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    packages = {package for command, package in commands.items() if shutil.which(command, path=path) is None}
    return sorted(packages | {package for file, package in files.items() if not file.exists()})


def install(packages: list[str], tell: Callable[[str], None]) -> None:
    """Raises: ClusterError that names the packages, where this process may not install them."""
    if not packages:
        return
    named = " ".join(packages)
    if os.geteuid() != 0:
        raise ClusterError(f"not root, so these Debian packages cannot be installed: apt-get install {named}")
    if shutil.which("apt-get") is None:
        raise ClusterError(f"no apt-get here; install what Debian calls: {named}")
    tell(f"installing {named}")
    with _no_service_starts():
        run("apt-get", "update", "-qq", within_s=300)
        install_words = ["apt-get", "install", "-qq", "--no-install-recommends"]
        run(*install_words, *packages, environment={"DEBIAN_FRONTEND": "noninteractive"}, within_s=600)


@contextmanager
def _no_service_starts() -> Iterator[None]:
    """Debian starts the service of a package it installs, unless this file says no: only the binaries are wanted."""
    if _START_POLICY.exists():
        yield
        return
    _START_POLICY.write_text("#!/bin/sh\nexit 101\n")
    _START_POLICY.chmod(0o755)
    try:
        yield
    finally:
        _START_POLICY.unlink()
