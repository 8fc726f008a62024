"""An S3 store (versitygw on a folder) in the network of the first node, where pods can reach it."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from cluster.programs.go_programs import VERSITYGW
from installation import wait_until

KEYS = {"accessKeyId": "someone", "secretAccessKey": "something"}
BUCKET = "models"


class ObjectStore:
    """An S3 store with one bucket."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id=KEYS["accessKeyId"],
            aws_secret_access_key=KEYS["secretAccessKey"],
            config=Config(s3={"addressing_style": "path"}),
        )
        self._client.create_bucket(Bucket=BUCKET)

    def put_folder(self, folder: Path, path: str) -> None:
        """Upload each file of a folder below the path."""
        for file in folder.iterdir():
            self._client.upload_file(str(file), BUCKET, f"{path}/{file.name}")

    def close(self) -> None:
        self._client.close()


@contextmanager
def running_store(folder: Path, address: str) -> Iterator[ObjectStore]:
    """Run a store. Args: address: of the first node, because the scenarios run in its network."""
    with socket.create_server((address, 0)) as taken:
        port = taken.getsockname()[1]
    login = ["--access", KEYS["accessKeyId"], "--secret", KEYS["secretAccessKey"]]
    command = [VERSITYGW.path, "--quiet", "--port", f"{address}:{port}", *login, "posix", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(address, port))
        store = ObjectStore(f"http://{address}:{port}")
        yield store
        store.close()
    finally:
        process.kill()
        process.wait()


def _answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
        return True
    return False
