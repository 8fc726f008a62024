"""Copies images into the nodes, which have no registry to pull from."""

import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from cluster.images.building import find_builder
from cluster.machine.commands import run
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Node
from cluster.machine.namespaces import enter_command

_IMPORT_WITHIN_S = 900.0
_PART_BYTES = 1 << 20


def import_archive(node: Node, archive: Path) -> None:
    """Import an OCI archive into a node, with the image names in the archive."""
    run(*enter_command(node), *ctr("images", "import", str(archive)), within_s=_IMPORT_WITHIN_S)


def load(nodes: Sequence[Node], image: str) -> None:
    """Copy an image from docker or buildah into all nodes as one stream, without a file on disk.

    Raises: ClusterError with the output of the export or of an import.
    """
    builder = find_builder()
    imports = [[*enter_command(node), *import_command()] for node in nodes]
    try:
        stream(builder.export_command(image), imports, environment=dict(builder.environment))
    except ClusterError as error:
        raise ClusterError(f"{image} was not loaded: {error}") from error
    for node in nodes:
        # The layers are unpacked in the node now. Their archives, which are as large, are not needed any more.
        run(*enter_command(node), *prune_command(), within_s=_IMPORT_WITHIN_S)


def add_image_name(node: Node, image: str, name: str) -> None:
    """Give an image of the node a further name."""
    run(*enter_command(node), *ctr("images", "tag", "--force", image, name))


def import_command(address: str | None = None) -> list[str]:
    """Return the command that imports an image from standard input."""
    return ctr("images", "import", "-", address=address)


def prune_command(address: str | None = None) -> list[str]:
    """Return the command that removes the archives of unpacked layers."""
    return ctr("content", "prune", "references", address=address)


def ctr(*words: str, address: str | None = None) -> list[str]:
    """Return a command of containerd's client for the kubelet's images. Args: address: of its socket; None: default."""
    return ["ctr", *([] if address is None else [f"--address={address}"]), "--namespace=k8s.io", *words]


def stream(
    source: list[str],
    targets: list[list[str]],
    *,
    environment: Mapping[str, str] | None = None,
    rewrite: Callable[[IO[bytes], IO[bytes]], None] | None = None,
) -> None:
    """Run a command whose output is the input of several others.

    Args:
        environment: of the first, in addition to this process's own.
        rewrite: reads the output of the first and writes the input of the only target; None leaves it unchanged.
    Raises: ClusterError with their output, if one of them fails.
    """
    with ExitStack() as stack:
        first = stack.enter_context(_piped(source, stdin=subprocess.DEVNULL, environment=environment))
        others = [stack.enter_context(_piped(target, stdin=subprocess.PIPE)) for target in targets]
        if rewrite is None:
            _pump(first, others)
        else:
            _rewrite(first, others[0], rewrite)
        # Each writes little, so no pipe gets full before it is read.
        ended = [(process.wait(_IMPORT_WITHIN_S), _read_errors(process)) for process in (first, *others)]
    if any(status for status, _ in ended):
        raise ClusterError(" ".join(output for _, output in ended if output)[-2000:])


def _rewrite(
    source: "subprocess.Popen[bytes]",
    target: "subprocess.Popen[bytes]",
    rewrite: Callable[[IO[bytes], IO[bytes]], None],
) -> None:
    assert source.stdout is not None
    assert target.stdin is not None
    # If a process failed, its own output has the reason.
    with suppress(BrokenPipeError, tarfile.ReadError):
        rewrite(source.stdout, target.stdin)
    source.stdout.close()
    with suppress(BrokenPipeError):
        target.stdin.close()


def _pump(source: "subprocess.Popen[bytes]", targets: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Copy the source's output to each target, until the source ends or a target stops reading."""
    assert source.stdout is not None
    sinks = [target.stdin for target in targets if target.stdin is not None]
    with suppress(BrokenPipeError):
        while part := source.stdout.read(_PART_BYTES):
            for sink in sinks:
                sink.write(part)
    source.stdout.close()
    for sink in sinks:
        with suppress(BrokenPipeError):
            sink.close()


def _piped(
    command: list[str], *, stdin: int, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **(environment or {})}
    )


def _read_errors(process: "subprocess.Popen[bytes]") -> str:
    assert process.stderr is not None
    return process.stderr.read().decode(errors="replace").strip()
