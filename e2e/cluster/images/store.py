"""The image store for new nodes: Orca's images are unpacked once and linked into the runtime of every node.

~/.cache/orca/runtime/root           a containerd folder in which no container ever ran
                     /images.json    image -> its id in the store

Nothing writes to an unpacked layer, so all nodes share its files. Each node has its own databases of the runtime.
"""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from cluster.images.archives import chain_ids, without_layers
from cluster.images.building import Builder, find_builder
from cluster.images.loading import ctr, import_command, prune_command, stream
from cluster.machine.cache import cache_folder, check_space, exclusive_lock
from cluster.machine.commands import run
from cluster.machine.debian import COMMANDS, install, missing_packages
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Node

_SPACE_GB = 14.0
"""Space for a worker's layers, and for their archives during unpacking."""
_UP_WITHIN_S = 30.0
_PRUNE_WITHIN_S = 300.0


def store_folder() -> Path:
    return cache_folder() / "runtime"


def keep(images: Sequence[str], report: Callable[[str], None]) -> None:
    """Copy the present version of these images from docker or buildah into the store.

    Raises: ClusterError if one is not built, or with the output of an export or import.
    """
    builder = find_builder()
    store = store_folder()
    with exclusive_lock(store):
        kept = _read_index(store)
        wanted = {image: builder.image_id(image) for image in images}
        changed = [image for image in images if kept.get(image) != wanted[image]]
        if not changed:
            return
        install(missing_packages(COMMANDS), report)
        check_space(store, wanted_gb=_SPACE_GB, purpose="unpacking images")
        with _runtime(store) as address:
            for image in changed:
                begun = time.monotonic()
                _import(builder, image, address)
                kept[image] = wanted[image]
                (store / "images.json").write_text(json.dumps(kept))
                report(f"stored {image} for new nodes in {time.monotonic() - begun:.0f} s")


def link_store_into(node: Node) -> None:
    """Link the store into a node, before its runtime starts. Without a store the node starts empty."""
    root = store_folder() / "root"
    if not root.exists():
        return
    with exclusive_lock(store_folder()):
        target = node.folder / "var-lib" / "containerd"
        is_one_disk = root.stat().st_dev == target.parent.stat().st_dev
        run("cp", "--archive", *(["--link"] if is_one_disk else []), root, target, within_s=600)
        for database in root.glob("*/*.db"):
            own = target / database.relative_to(root)
            own.unlink()
            shutil.copy2(database, own)


def _import(builder: Builder, image: str, address: str) -> None:
    layers = builder.layers(image)
    kept = {layer for layer, chain in zip(layers, chain_ids(layers), strict=True) if _is_unpacked(address, chain)}
    send = partial(
        stream, builder.export_command(image), [import_command(address)], environment=dict(builder.environment)
    )
    try:
        send(rewrite=partial(without_layers, image=image, diff_ids=layers, known=kept) if layers else None)
    except ClusterError:
        if not kept:
            raise
        # The runtime's background cleaning may have removed a layer of an older image after the check above. The whole
        # image needs none of them.
        send(rewrite=None)
    run(*prune_command(address), within_s=_PRUNE_WITHIN_S)


def _is_unpacked(address: str, chain_id: str) -> bool:
    try:
        run(*ctr("snapshots", "info", chain_id, address=address))
    except ClusterError:
        return False
    return True


def _read_index(store: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((store / "images.json").read_text())
    except FileNotFoundError:
        return {}
    return found


@contextlib.contextmanager
def _runtime(store: Path) -> Iterator[str]:
    """Run a containerd that only unpacks, and yield the address of its socket."""
    (store / "root").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="orca-containerd-") as folder:
        address = f"{folder}/socket"
        settings, log = Path(folder, "config.toml"), Path(folder, "log")
        settings.write_text(
            f'version = 2\nroot = "{store / "root"}"\nstate = "{folder}/state"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{address}"\n'
        )
        command = ["unshare", "--mount", "--propagation", "private", "containerd", "--config", str(settings)]
        with log.open("wb") as words:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
        try:
            _wait_until_up(process, address, log)
            yield address
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_UP_WITHIN_S)
            process.kill()


def _wait_until_up(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    end = time.monotonic() + _UP_WITHIN_S
    while True:
        with contextlib.suppress(ClusterError):
            run(*ctr("version", address=address), within_s=5)
            return
        if process.poll() is not None or time.monotonic() > end:
            raise ClusterError(f"containerd did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
