"""Images into the nodes, which have no registry to pull from."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from cluster.building import builder_here
from cluster.commands import run
from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.namespaces import entering

_IMPORT = ("ctr", "--namespace=k8s.io", "images", "import")
_IMPORT_WITHIN_S = 900.0
_PART_BYTES = 1 << 20


def import_archive(node: Node, archive: Path) -> None:
    """An OCI archive, under the names that it has inside."""
    run(*entering(node), *_IMPORT, archive, within_s=_IMPORT_WITHIN_S)


def load(nodes: Sequence[Node], image: str) -> None:
    """An image of docker's or buildah's store, as one stream into all nodes: it never lies on the disk as a file.

    Raises: ClusterError with what the export or an import said.
    """
    builder = builder_here()
    imports = [[*entering(node), *_IMPORT, "-"] for node in nodes]
    try:
        stream(builder.export_command(image), imports, environment=dict(builder.environment))
    except ClusterError as error:
        raise ClusterError(f"{image} was not loaded: {error}") from error
    for node in nodes:
        # The layers lie unpacked in the node now; their archives, as large again, may go.
        run(*entering(node), "ctr", "--namespace=k8s.io", "content", "prune", "references", within_s=_IMPORT_WITHIN_S)


def stream(source: list[str], targets: list[list[str]], *, environment: Mapping[str, str] | None = None) -> None:
    """Run a command whose output is the input of several others.

    Args:
        environment: of the first, added to this process's own.
    Raises: ClusterError with what they said, when one of them fails.
    """
    with ExitStack() as stack:
        first = stack.enter_context(_piped(source, stdin=subprocess.DEVNULL, environment=environment))
        others = [stack.enter_context(_piped(target, stdin=subprocess.PIPE)) for target in targets]
        _pump(first, others)
        # Each says little, so none waits for its words to be read.
        ended = [(process.wait(_IMPORT_WITHIN_S), _words(process)) for process in (first, *others)]
    if any(status for status, _ in ended):
        raise ClusterError(" ".join(said for _, said in ended if said)[-2000:])


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
