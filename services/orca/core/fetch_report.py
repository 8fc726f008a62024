"""Reports of a fetch (`orca fetch`) to its starter: progress on the internal port, a reason in the last line."""

import json
from dataclasses import asdict, dataclass

PROGRESS_PAGE = "/progress"
REASONS = ("ModelMissing", "ModelDenied", "ModelBroken", "NoSpace", "ModelUnreachable")
"""Reasons why a model is not there; orca.cli.fetch.errors explains each."""
PERMANENT_EXIT, RETRY_EXIT = 2, 1
"""Exit status of a fetch that the next start would only repeat, and of one that the next start goes on with."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    bytes_done: int = 0  # on the volume, those of earlier starts too
    bytes_total: int = 0  # 0 until the files are listed
    problem: str | None = None  # of the last attempt, in the form of a last line; None once bytes come again


def progress_body(progress: FetchProgress) -> bytes:
    """Return the body of the progress page."""
    return json.dumps(asdict(progress)).encode()


def read_progress(body: bytes) -> FetchProgress:
    """Raises: ValueError when the body is not that of a progress page."""
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"{found!r} is not a JSON object")
    done, total, problem = (found.get(name) for name in ("bytes_done", "bytes_total", "problem"))
    if not (isinstance(done, int) and isinstance(total, int) and isinstance(problem, str | None)):
        raise ValueError(f"{found!r} is not the progress of a fetch")
    return FetchProgress(done, total, problem)


def format_reason(reason: str, sentence: str) -> str:
    """Return the last line of a fetch that failed. Args: reason: one of REASONS."""
    return f"{reason}: {sentence}"


def read_reason(text: str) -> tuple[str, str] | None:
    """Return reason and sentence from the last line of a text; None if that line gives no reason."""
    lines = text.strip().splitlines()
    reason, _, sentence = (lines[-1] if lines else "").partition(": ")
    return (reason, sentence) if reason in REASONS else None
