"""Reads models from the Hugging Face hub, or from a server with the same API at HF_ENDPOINT.

A branch or tag is resolved once, and all files come from its commit. The hub's listing has the SHA-256 of large files,
and the git blob id of small ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import httpx2
from huggingface_hub import HfApi, get_session, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoSibling

from orca.cli.fetch.errors import ModelUnreachable, error_of_status
from orca.cli.fetch.source import ModelListing, RemoteFile, git_blob, sha256

TIMEOUT_S = 30.0
"""Longest time to wait for the next bytes of the hub."""
PIECE_BYTES = 1 << 20


class HubSource:
    """One model on the hub. HF_TOKEN is sent if it is set."""

    def __init__(self, repository: str, revision: str | None) -> None:
        """Args: repository: ORGANISATION/NAME. revision: commit, branch or tag; None means main."""
        self._repository = repository
        self._revision = revision or "main"

    def listing(self) -> ModelListing:
        what = f"revision {self._revision}"
        try:
            info = HfApi().model_info(self._repository, revision=self._revision, files_metadata=True, timeout=TIMEOUT_S)
        except HfHubHTTPError as error:
            raise error_of_status(error.response.status_code, what) from error
        except (httpx2.HTTPError, OSError, ValueError) as error:
            raise ModelUnreachable(f"{what}: {_first_line(error)}") from error
        if info.sha is None:
            raise ModelUnreachable(f"{what}: the hub lists no commit")
        self._revision = info.sha
        return ModelListing(info.sha, tuple(_remote_file(sibling) for sibling in info.siblings or ()))

    @contextmanager
    def read(self, file: RemoteFile, from_byte: int) -> Iterator[Iterator[bytes]]:
        url = hf_hub_url(self._repository, file.name, revision=self._revision)
        headers = {"Range": f"bytes={from_byte}-", "Accept-Encoding": "identity"}
        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"
        try:
            with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
                if response.status_code not in (200, 206):
                    raise error_of_status(response.status_code, file.name)
                pieces = response.iter_bytes(PIECE_BYTES)
                yield pieces if response.status_code == 206 else _without_head(pieces, from_byte)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ModelUnreachable(f"{file.name}: {_first_line(error)}") from error


def _remote_file(sibling: RepoSibling) -> RemoteFile:
    """Convert an entry of the listing. Raises: ModelUnreachable when it has no size or digest, as on no real hub."""
    name, size = sibling.rfilename, sibling.size
    if size is not None and sibling.lfs is not None:
        return RemoteFile(name, size, sha256(sibling.lfs.sha256))
    if size is not None and sibling.blob_id is not None:
        return RemoteFile(name, size, git_blob(size, sibling.blob_id))
    raise ModelUnreachable(f"the hub lists {name} without its size and digest")


def _without_head(pieces: Iterator[bytes], count: int) -> Iterator[bytes]:
    """Skip the first `count` bytes, which are on disk already: a server without ranges sends the whole file again."""
    for piece in pieces:
        if count < len(piece):
            return chain([piece[count:]], pieces)
        count -= len(piece)
    return iter(())


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
