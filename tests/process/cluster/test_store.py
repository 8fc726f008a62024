"""Mounts of a node's store."""

from pathlib import Path

import pytest

from cluster.images.store import link_store_into, store_folder
from cluster.machine.layout import Node

LAYER = Path("io.containerd.snapshotter.v1.overlayfs/snapshots/1/fs/program")

DATABASE = Path("io.containerd.metadata.v1.bolt/meta.db")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with one file of each kind."""
    monkeypatch.setenv("ORCA_CACHE", str(tmp_path / "cache"))
    root = store_folder() / "root"
    for path in (LAYER, DATABASE):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text("as unpacked")
    return root


def node(folder: Path) -> Node:
    made = Node(0, folder / "node-0")
    (made.folder / "var-lib").mkdir(parents=True)
    return made


def test_layers_are_shared_and_databases_are_not(store: Path, tmp_path: Path) -> None:
    one = node(tmp_path)
    link_store_into(one)
    there = one.folder / "var-lib" / "containerd"
    assert (there / LAYER).samefile(store / LAYER)
    assert not (there / DATABASE).samefile(store / DATABASE)
    assert (there / DATABASE).read_text() == "as unpacked"


def test_writes_of_a_node_stay_in_its_own_database(store: Path, tmp_path: Path) -> None:
    one = node(tmp_path)
    link_store_into(one)
    (one.folder / "var-lib" / "containerd" / DATABASE).write_text("of one node")
    assert (store / DATABASE).read_text() == "as unpacked"
