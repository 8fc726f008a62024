"""An image is sent on without the layers that are there already."""

import hashlib
import io
import json
import tarfile

import pytest

from cluster.images.archives import chain_ids, without_layers
from cluster.images.scratch import add_bytes

LOWER, UPPER = b"lower" * 1000, b"upper" * 1000
CONFIG = b'{"architecture": "amd64"}'
NAME = "localhost/orca-worker:dev"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


IDS = [f"sha256:{digest(LOWER)}", f"sha256:{digest(UPPER)}"]


def exported() -> io.BytesIO:
    """Write the archive as buildah does."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w|") as archive:
        for layer in (LOWER, UPPER):
            add_bytes(archive, f"{digest(layer)}.tar", layer)
        add_bytes(archive, f"{digest(CONFIG)}.json", CONFIG)
        add_bytes(archive, "0123/VERSION", b"1.0")
        add_bytes(archive, "manifest.json", b"[]")
    written.seek(0)
    return written


def rewritten(*kept: str) -> dict[str, bytes]:
    """Files by name."""
    target = io.BytesIO()
    without_layers(exported(), target, NAME, IDS, kept)
    target.seek(0)
    with tarfile.open(fileobj=target) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def test_new_layers_are_sent_under_their_digests() -> None:
    files = rewritten()
    for content in (LOWER, UPPER, CONFIG):
        assert files[f"blobs/sha256/{digest(content)}"] == content
    assert "0123/VERSION" not in files


def test_an_existing_layer_is_named_and_not_sent() -> None:
    files = rewritten(IDS[0])
    assert f"blobs/sha256/{digest(LOWER)}" not in files
    [entry] = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"] == {"io.containerd.image.name": NAME}
    manifest = json.loads(files[f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}"])
    assert [(layer["digest"], layer["size"]) for layer in manifest["layers"]] == [(IDS[0], 5000), (IDS[1], 5000)]
    assert manifest["config"]["digest"] == f"sha256:{digest(CONFIG)}"


def test_an_incomplete_export_is_no_image() -> None:
    cut = io.BytesIO(exported().getvalue()[:6000])
    with pytest.raises((tarfile.ReadError, KeyError)):
        without_layers(cut, io.BytesIO(), NAME, IDS, ())


def test_a_layer_is_identified_by_all_layers_below_it() -> None:
    assert chain_ids(IDS) == [IDS[0], f"sha256:{digest(f'{IDS[0]} {IDS[1]}'.encode())}"]
    assert chain_ids([]) == []
