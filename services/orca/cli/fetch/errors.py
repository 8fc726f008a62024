"""Why a fetch ended without the model.

FetchError             the name of the class is the first word of what the process says at its end
├── ModelMissing       there is no such model, revision or folder
├── ModelDenied        it may not be read with this token, these keys, or none
├── ModelBroken        what is there differs from its digests, or cannot be served
├── NoSpace            the volume is too small
└── ModelUnreachable   the hub or the store does not answer well now

The first three never end well by themselves (exit code 2); of the others the next try may (1), and goes on where this
one was.
"""

from orca.core.domain.errors import OrcaError
from orca.core.fetch_report import PERMANENT_EXIT, RETRY_EXIT


class FetchError(OrcaError):
    """The message is one sentence for whoever wrote the uri, and is said behind it."""

    exit_code = PERMANENT_EXIT

    @property
    def reason(self) -> str:
        """One of core.fetch_report.REASONS."""
        return type(self).__name__


class ModelMissing(FetchError):
    """Nothing is there under that name."""


class ModelDenied(FetchError):
    """It may not be read."""


class ModelBroken(FetchError):
    """What is there cannot be served."""


class NoSpace(FetchError):
    """The volume cannot hold it; somebody may make it larger."""

    exit_code = RETRY_EXIT


class ModelUnreachable(FetchError):
    """No answer, or one that tells of a passing trouble."""

    exit_code = RETRY_EXIT


def of_status(status: int, what: str) -> FetchError:
    """The error of an HTTP status. Args: what: was asked for, and what was said to it."""
    if status in (401, 403):
        return ModelDenied(f"{what}: HTTP {status}; there is no such model, or it needs another token or other keys")
    if status in (404, 410):
        return ModelMissing(f"{what}: HTTP {status}")
    return ModelUnreachable(f"{what}: HTTP {status}")
