"""Images of static programs: an archive whose digests fit."""

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cluster.images.scratch import ScratchImage


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return the files of an image of one program with a link: name -> content."""
    monkeypatch.setenv("ORCA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tool").write_bytes(b"program")
    image = ScratchImage("localhost/tool:1", (tmp_path / "tool",), entry=("/bin/tool",), links=("hammer", "tool"))
    return contents(image.write_archive())


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as opened:
        files = {entry.name: opened.extractfile(entry) for entry in opened}
        return {name: file.read() for name, file in files.items() if file is not None}


def blob(archive: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    found = archive[f"blobs/{descriptor['digest'].replace(':', '/')}"]
    assert len(found) == descriptor["size"]
    return found


def manifest(archive: dict[str, bytes]) -> dict[str, Any]:
    [entry] = json.loads(archive["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == "localhost/tool:1"
    read: dict[str, Any] = json.loads(blob(archive, entry))
    return read


def test_each_blob_is_called_by_its_digest(archive: dict[str, bytes]) -> None:
    blobs = {name.removeprefix("blobs/sha256/"): content for name, content in archive.items() if "blobs" in name}
    assert len(blobs) == 3
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in blobs.items())


def test_the_layer_is_the_one_that_the_config_unpacks(archive: dict[str, bytes]) -> None:
    config = json.loads(blob(archive, manifest(archive)["config"]))
    [layer] = manifest(archive)["layers"]
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]
    assert config["config"]["Entrypoint"] == ["/bin/tool"]
    assert config["config"]["User"] == "65532:65532"


def test_the_layer_has_the_program_and_a_link_to_it(archive: dict[str, bytes], tmp_path: Path) -> None:
    [layer] = manifest(archive)["layers"]
    (tmp_path / "layer.tar").write_bytes(blob(archive, layer))
    with tarfile.open(tmp_path / "layer.tar") as opened:
        program, link = opened.getmember("bin/tool"), opened.getmember("bin/hammer")
    assert (program.isfile(), program.uid, program.mode) == (True, 0, 0o755)
    assert (link.issym(), link.linkname) == (True, "tool")
