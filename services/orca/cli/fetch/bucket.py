"""Reads models from S3, or from a server with the same API at AWS_ENDPOINT_URL.

Credentials come from the usual AWS variables. Without credentials, the bucket is read as a public one.

The digest of an object is the first of these that exists. Its SHA-256, if it was uploaded with one. Its ETag, if that
is an MD5 of the content. Its ETag as the MD5s of equal parts. With KMS encryption an ETag is no digest, and only the
size is checked.
"""

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from orca.cli.fetch.errors import FetchError, ModelMissing, ModelUnreachable, error_of_status
from orca.cli.fetch.source import Digest, ModelListing, RemoteFile, md5, md5_of_parts, sha256

TIMEOUT_S = 30.0
"""Longest time to wait for the next bytes of the store."""
PIECE_BYTES = 1 << 20


class BucketSource:
    """The objects directly below one path of a bucket."""

    def __init__(self, bucket: str, path: str) -> None:
        """Args: path: without slashes around it."""
        self._bucket = bucket
        self._prefix = f"{path}/"
        self._client = _client()
        self._tags: dict[str, str] = {}  # ETag by file name: identifies the content that was listed

    def listing(self) -> ModelListing:
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix, Delimiter="/"
            )
            keys = [item["Key"] for page in pages for item in page.get("Contents", ()) if item["Key"] != self._prefix]
            files = tuple(self._remote_file(key) for key in keys)
        except (ClientError, BotoCoreError) as error:
            raise _fetch_error(error, "the list of files") from error
        if not files:
            raise ModelMissing("there is no file at this path")
        lines = [f"{file.name} {file.size_bytes} {self._tags[file.name]}\n" for file in files]
        return ModelListing(hashlib.sha256("".join(lines).encode()).hexdigest()[:40], files)

    @contextmanager
    def read(self, file: RemoteFile, from_byte: int) -> Iterator[Iterator[bytes]]:
        try:
            found = self._client.get_object(
                Bucket=self._bucket,
                Key=self._prefix + file.name,
                Range=f"bytes={from_byte}-",
                IfMatch=self._tags[file.name],
            )
            with closing(found["Body"]) as body:
                yield body.iter_chunks(PIECE_BYTES)
        except (ClientError, BotoCoreError) as error:
            raise _fetch_error(error, file.name) from error

    def _remote_file(self, key: str) -> RemoteFile:
        head = self._client.head_object(Bucket=self._bucket, Key=key, ChecksumMode="ENABLED")
        name = key.removeprefix(self._prefix)
        self._tags[name] = head["ETag"]
        return RemoteFile(name, head["ContentLength"], self._digest(key, head))

    def _digest(self, key: str, head: Mapping[str, Any]) -> Digest | None:
        tag = head["ETag"].strip('"')
        if head.get("ChecksumType") == "FULL_OBJECT" and "ChecksumSHA256" in head:
            return sha256(base64.b64decode(head["ChecksumSHA256"]).hex())
        if str(head.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in head:
            return None
        if "-" not in tag:
            return md5(tag) if len(tag) == 32 else None
        first = self._client.head_object(Bucket=self._bucket, Key=key, PartNumber=1)
        part_bytes, parts = first["ContentLength"], int(tag.rpartition("-")[2])
        is_even = part_bytes and -(-head["ContentLength"] // part_bytes) == parts
        return md5_of_parts(part_bytes, tag) if is_even else None


def _client() -> Any:
    session = boto3.Session()
    is_open = session.get_credentials() is None
    config = Config(
        signature_version=UNSIGNED if is_open else None,
        connect_timeout=TIMEOUT_S,
        read_timeout=TIMEOUT_S,
        # The download itself tries again and resumes.
        retries={"total_max_attempts": 1},
        response_checksum_validation="when_required",
        # Stores other than Amazon's seldom have a host name for each bucket.
        s3={"addressing_style": "path" if _has_endpoint(os.environ) else "auto"},
    )
    return session.client("s3", region_name=session.region_name or "us-east-1", config=config)


def _has_endpoint(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL"))


def _fetch_error(error: Exception, what: str) -> FetchError:
    """Convert an error of botocore. Args: what: names the thing that was read."""
    if not isinstance(error, ClientError):
        return ModelUnreachable(f"{what}: {error}")
    status, message = error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"].get("Message", "")
    if status == 412:
        return ModelUnreachable(f"{what}: it was changed while it was fetched")
    return error_of_status(status, f"{what}: {message}".removesuffix(": "))
