"""New nodes begin with links to one store, but with databases of their own."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.images import store as store_module
from cluster.images.building import Builder
from cluster.images.store import keep, link_store_into, store_folder
from cluster.machine.errors import ClusterError
from cluster.machine.layout import Node


def node(folder: Path) -> Node:
    made = Node(0, folder / "node-0")
    (made.folder / "var-lib").mkdir(parents=True)
    return made


def test_without_a_store_a_node_begins_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCA_CACHE", str(tmp_path / "cache"))
    one = node(tmp_path)
    link_store_into(one)
    assert not list((one.folder / "var-lib").iterdir())


class FakeRuntime:
    """A fake runtime of a node. Its first imports without all layers fail, as if such a layer had just been deleted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refused: int, unpacked: bool) -> None:
        self.whole: list[bool] = []  # per import: was it sent with all of its layers?
        self._refused = refused
        monkeypatch.setattr(store_module, "find_builder", lambda: Builder("buildah"))
        monkeypatch.setattr(Builder, "image_id", lambda *_: "sha256:1")
        monkeypatch.setattr(Builder, "layers", lambda *_: ["sha256:a", "sha256:b"])
        monkeypatch.setattr(store_module, "missing_packages", lambda _: [])
        monkeypatch.setattr(store_module, "check_space", lambda *_, **__: None)
        monkeypatch.setattr(store_module, "_runtime", self._runtime)
        monkeypatch.setattr(store_module, "_is_unpacked", lambda *_: unpacked)
        monkeypatch.setattr(store_module, "run", lambda *_, **__: "")
        monkeypatch.setattr(store_module, "stream", self._stream)

    @contextlib.contextmanager
    def _runtime(self, _: Path) -> Iterator[str]:
        store_folder().mkdir(parents=True, exist_ok=True)
        yield "socket"

    def _stream(self, *_: object, rewrite: Callable[..., None] | None, **__: object) -> None:
        self.whole.append(rewrite is None)
        if len(self.whole) <= self._refused:
            raise ClusterError("content digest sha256:b: not found")


def test_an_image_whose_unpacked_layers_went_meanwhile_is_sent_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCA_CACHE", str(tmp_path / "cache"))
    runtime = FakeRuntime(monkeypatch, refused=1, unpacked=True)
    keep(["localhost/orca-pool:dev"], lambda _: None)
    assert runtime.whole == [False, True]
    assert json.loads((store_folder() / "images.json").read_text()) == {"localhost/orca-pool:dev": "sha256:1"}


def test_an_image_that_cannot_be_imported_is_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCA_CACHE", str(tmp_path / "cache"))
    runtime = FakeRuntime(monkeypatch, refused=9, unpacked=False)
    with pytest.raises(ClusterError, match="not found"):
        keep(["localhost/orca-pool:dev"], lambda _: None)
    assert runtime.whole == [False]
