"""The reasons for which a fetch fails.

FetchError             the name of the class is the first word of the process's last line
├── ModelMissing       there is no such model, revision or folder
├── ModelDenied        the token or keys, or the lack of them, do not allow reading the model
├── ModelBroken        the files differ from their digests, or cannot be served
├── NoSpace            the volume is too small
└── ModelUnreachable   the hub or store does not answer, or answers with a temporary error

Trying again cannot help with the first three (exit code 2). With the other two it may (exit code 1), and the next try
resumes this one.
"""

from orca.core.domain.errors import OrcaError
from orca.core.fetch_report import PERMANENT_EXIT, RETRY_EXIT


class FetchError(OrcaError):
    """A fetch has failed. The message is one sentence for the author of the uri, and is printed after the uri."""

    exit_code = PERMANENT_EXIT

    @property
    def reason(self) -> str:
        """The reason, one of core.fetch_report.REASONS."""
        return type(self).__name__


class ModelMissing(FetchError):
    """There is no model under this name."""


class ModelDenied(FetchError):
    """The model may not be read."""


class ModelBroken(FetchError):
    """The model cannot be served."""


class NoSpace(FetchError):
    """The volume cannot hold the model; somebody may enlarge it."""

    exit_code = RETRY_EXIT


class ModelUnreachable(FetchError):
    """There is no answer, or an answer that reports a temporary failure."""

    exit_code = RETRY_EXIT


def error_of_status(status: int, what: str) -> FetchError:
    """Return the error for an HTTP status. Args: what: names the thing that was read, and the server's message."""
    if status in (401, 403):
        return ModelDenied(f"{what}: HTTP {status}; there is no such model, or it needs another token or other keys")
    if status in (404, 410):
        return ModelMissing(f"{what}: HTTP {status}")
    return ModelUnreachable(f"{what}: HTTP {status}")
