"""Images into the nodes, which have no registry to pull from."""

import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from cluster.images.building import builder_here
from cluster.machine.commands import run
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Node
from cluster.machine.namespaces import entering

_IMPORT_WITHIN_S = 900.0
_PART_BYTES = 1 << 20


def import_archive(node: Node, archive: Path) -> None:
    """An OCI archive, under the names that it has inside."""
    run(*entering(node), *ctr("images", "import", str(archive)), within_s=_IMPORT_WITHIN_S)


def load(nodes: Sequence[Node], image: str) -> None:
    """An image of docker's or buildah's store, as one stream into all nodes: it never lies on the disk as a file.

    Raises: ClusterError with what the export or an import said.
    """
    builder = builder_here()
    imports = [[*entering(node), *import_command()] for node in nodes]
    try:
        stream(builder.export_command(image), imports, environment=dict(builder.environment))
    except ClusterError as error:
        raise ClusterError(f"{image} was not loaded: {error}") from error
    for node in nodes:
        # The layers lie unpacked in the node now; their archives, as large again, may go.
        run(*entering(node), *prune_command(), within_s=_IMPORT_WITHIN_S)


def name_again(node: Node, image: str, name: str) -> None:
    """Give an image of the node another name beside its own."""
    run(*entering(node), *ctr("images", "tag", "--force", image, name))


def import_command(address: str | None = None) -> list[str]:
    """Takes an image from standard input."""
    return ctr("images", "import", "-", address=address)


def prune_command(address: str | None = None) -> list[str]:
    """Lets the archives go of what lies unpacked."""
    return ctr("content", "prune", "references", address=address)


def ctr(*words: str, address: str | None = None) -> list[str]:
    """containerd's own command, about what kubelets use. Args: address: of its socket; None takes the usual one."""
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
        environment: of the first, added to this process's own.
        rewrite: reads what the first wrote and writes what the only target gets; None leaves it as it is.
    Raises: ClusterError with what they said, when one of them fails.
    """
    with ExitStack() as stack:
        first = stack.enter_context(_piped(source, stdin=subprocess.DEVNULL, environment=environment))
        others = [stack.enter_context(_piped(target, stdin=subprocess.PIPE)) for target in targets]
        if rewrite is None:
            _pump(first, others)
        else:
            _rewrite(first, others[0], rewrite)
        # Each says little, so none waits for its words to be read.
        ended = [(process.wait(_IMPORT_WITHIN_S), _words(process)) for process in (first, *others)]
    if any(status for status, _ in ended):
        raise ClusterError(" ".join(said for _, said in ended if said)[-2000:])


def _rewrite(
    source: "subprocess.Popen[bytes]",
    target: "subprocess.Popen[bytes]",
    rewrite: Callable[[IO[bytes], IO[bytes]], None],
) -> None:
    assert source.stdout is not None
    assert target.stdin is not None
    # What a process that failed did not write, or did not read, is told by its own words.
    with suppress(BrokenPipeError, tarfile.ReadError):
        rewrite(source.stdout, target.stdin)
    source.stdout.close()
    with suppress(BrokenPipeError):
        target.stdin.close()


def _pump(source: "subprocess.Popen[bytes]", targets: Sequence["subprocess.Popen[bytes]"]) -> None:
    """What the source writes goes to each target, until the source ends or a target no longer reads."""
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


def _words(process: "subprocess.Popen[bytes]") -> str:
    assert process.stderr is not None
    return process.stderr.read().decode(errors="replace").strip()
