"""Models of an S3 store: versitygw, a real one, on a folder of the test."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from cluster.programs.go_programs import VERSITYGW
from support.fetch.fetching import WEIGHTS_BYTES, FetchProcess, contents, model_files
from support.fetch.line import line_to
from support.waiting import wait_until

KEYS = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "something"}
PART_BYTES = 5 << 20
"""The least that S3 allows."""


class Store:
    """A running store with a bucket `models`; what is in it lies in `folder`."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        url = f"http://127.0.0.1:{port}"
        self.folder = folder / "models"
        self.variables = {**KEYS, "AWS_ENDPOINT_URL": url, "AWS_CONFIG_FILE": os.devnull}
        config = Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required")
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            config=config,
        )

    def put(self, files: dict[str, bytes], **options: str) -> None:
        for name, content in files.items():
            self.client.put_object(Bucket="models", Key=f"llama/7b/{name}", Body=content, **options)

    def fetch(self, into: Path, path: str = "models/llama/7b", **variables: str) -> FetchProcess:
        return FetchProcess(f"s3://{path}", into, {**self.variables, **variables})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    if not VERSITYGW.path.exists():
        pytest.skip("no S3 store is here: `python -m cluster binaries` builds versitygw into the cache in a minute")
    folder = tmp_path / "store"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    login = ["--access", KEYS["AWS_ACCESS_KEY_ID"], "--secret", KEYS["AWS_SECRET_ACCESS_KEY"]]
    command = [VERSITYGW.path, "--quiet", "--port", f"127.0.0.1:{port}", *login, "posix", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(port), 30)
        store = Store(port, folder)
        store.client.create_bucket(Bucket="models")
        yield store
        store.client.close()
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_a_model_is_fetched_completely_and_a_second_start_makes_no_call(store: Store, tmp_path: Path) -> None:
    store.put(model_files() | {"own.py": b"code", "deeper/config.json": b"{}"})
    store.fetch(tmp_path / "model").succeed()
    assert contents(tmp_path / "model") == model_files()
    store.fetch(tmp_path / "model", AWS_ENDPOINT_URL="http://127.0.0.1:9").succeed()


def test_a_killed_fetch_continues_without_fetching_a_byte_twice(store: Store, tmp_path: Path) -> None:
    store.put(model_files())
    with line_to(store.port) as line:
        url = f"http://127.0.0.1:{line.port}"
        line.silent_after = WEIGHTS_BYTES // 2
        first = store.fetch(tmp_path / "model", AWS_ENDPOINT_URL=url)
        # The pieces of a megabyte that have come whole.
        first.wait_for_bytes(WEIGHTS_BYTES // 3)
        first.kill()
        line.silent_after = None
        store.fetch(tmp_path / "model", AWS_ENDPOINT_URL=url).succeed()
        # Beside the files there are headers, listings, and the piece that the kill cut.
        assert line.bytes_down < WEIGHTS_BYTES + (1 << 20)
    assert contents(tmp_path / "model") == model_files()


def test_an_object_that_has_changed_on_the_disk_of_the_store_is_broken(store: Store, tmp_path: Path) -> None:
    store.put(model_files())
    with (store.folder / "llama/7b/model.safetensors").open("r+b") as weights:
        weights.seek(1000)
        weights.write(b"!")
    code, said = store.fetch(tmp_path / "model").end()
    assert (code, "ModelBroken" in said, (tmp_path / "model").exists()) == (2, True, False)


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_an_object_of_many_parts_is_checked_by_its_tag(store: Store, tmp_path: Path, is_spoilt: bool) -> None:
    store.put(model_files())
    large = tmp_path / "large"
    large.write_bytes(model_files(2 * PART_BYTES + 77)["model.safetensors"])
    parts = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES)
    store.client.upload_file(str(large), "models", "llama/7b/model.safetensors", Config=parts)
    if is_spoilt:
        with (store.folder / "llama/7b/model.safetensors").open("r+b") as weights:
            weights.seek(PART_BYTES + 5)
            weights.write(b"!")
    assert store.fetch(tmp_path / "model").end()[0] == (2 if is_spoilt else 0)


def test_an_object_is_checked_by_its_own_sha256(store: Store, tmp_path: Path) -> None:
    store.put(model_files(), ChecksumAlgorithm="SHA256")
    store.fetch(tmp_path / "model").succeed()


@pytest.mark.parametrize("path", ["models/llama/13b", "nothing/llama"])
def test_a_path_or_bucket_without_files_is_missing(store: Store, tmp_path: Path, path: str) -> None:
    code, said = store.fetch(tmp_path / "model", path).end()
    assert (code, said.partition(":")[0]) == (2, "ModelMissing")


def test_wrong_keys_are_denied(store: Store, tmp_path: Path) -> None:
    store.put(model_files())
    code, said = store.fetch(tmp_path / "model", AWS_SECRET_ACCESS_KEY="another").end()
    assert (code, said.partition(":")[0]) == (2, "ModelDenied")


def test_a_private_bucket_is_denied_without_keys(store: Store, tmp_path: Path) -> None:
    store.put(model_files())
    nobody = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    code, said = store.fetch(tmp_path / "model", **nobody).end()
    assert (code, said.partition(":")[0]) == (2, "ModelDenied")


def test_an_unreachable_store_may_be_retried(tmp_path: Path) -> None:
    code, said = Store(9, tmp_path).fetch(tmp_path / "model").end()
    assert (code, said.partition(":")[0]) == (1, "ModelUnreachable")
