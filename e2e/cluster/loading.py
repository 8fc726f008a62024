"""Images into the nodes, which have no registry to pull from."""

import os
import subprocess
from pathlib import Path

from cluster.building import Builder, builder_here
from cluster.commands import run
from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.namespaces import entering

_IMPORT = ("ctr", "--namespace=k8s.io", "images", "import")
_IMPORT_WITHIN_S = 900.0


def import_archive(node: Node, archive: Path) -> None:
    """An OCI archive, under the names that it has inside."""
    run(*entering(node), *_IMPORT, archive, within_s=_IMPORT_WITHIN_S)


def load(nodes: tuple[Node, ...], image: str) -> None:
    """An image of docker's or buildah's store, as a stream: it never lies on the disk as a file.

    Raises: ClusterError with what the export or an import said.
    """
    for node in nodes:
        _stream(builder_here(), image, node)
        # The layers lie unpacked in the node now; their archives, as large again, may go.
        run(*entering(node), "ctr", "--namespace=k8s.io", "content", "prune", "references", within_s=_IMPORT_WITHIN_S)


def _stream(builder: Builder, image: str, node: Node) -> None:
    source, target = builder.export_command(image), [*entering(node), *_IMPORT, "-"]
    environment = {**os.environ, **dict(builder.environment)}
    with subprocess.Popen(source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as exporting:
        importing = subprocess.run(target, stdin=exporting.stdout, capture_output=True, text=True, check=False)
        assert exporting.stdout is not None
        assert exporting.stderr is not None
        # An export whose reader has failed ends when its pipe does.
        exporting.stdout.close()
        said = exporting.stderr.read().decode(errors="replace")
    if exporting.returncode or importing.returncode:
        raise ClusterError(f"{image} into {node.name}: {(said + importing.stderr).strip()[-2000:]}")
