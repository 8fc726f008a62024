"""What a fetch (`orca fetch`) tells whoever started it: figures on its internal port, and a reason in its last line."""

import json
from dataclasses import asdict, dataclass

PROGRESS_PAGE = "/progress"
REASONS = ("ModelMissing", "ModelDenied", "ModelBroken", "NoSpace", "ModelUnreachable")
"""Why a model is not there; orca.cli.fetch.errors says what each means."""
NEVER_EXIT, AGAIN_EXIT = 2, 1
"""How a fetch ends that the next start would only repeat, and one that the next start goes on with."""


@dataclass(frozen=True, slots=True)
class Figures:
    bytes_done: int = 0  # on the volume, those of earlier starts too
    bytes_total: int = 0  # 0 until the files are listed
    problem: str | None = None  # what the last try met, as a last line would say it, until bytes come again


def figures_page(figures: Figures) -> bytes:
    """The body of the page."""
    return json.dumps(asdict(figures)).encode()


def read_figures(body: bytes) -> Figures:
    """Raises: ValueError when it is no such body."""
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"{found!r} is not a JSON object")
    done, total, problem = (found.get(name) for name in ("bytes_done", "bytes_total", "problem"))
    if not (isinstance(done, int) and isinstance(total, int) and isinstance(problem, str | None)):
        raise ValueError(f"{found!r} are no figures of a fetch")
    return Figures(done, total, problem)


def last_line(reason: str, sentence: str) -> str:
    """Args: reason: one of REASONS."""
    return f"{reason}: {sentence}"


def read_reason(text: str) -> tuple[str, str] | None:
    """Reason and sentence out of the last line of a text; None when that gives no reason."""
    lines = text.strip().splitlines()
    reason, _, sentence = (lines[-1] if lines else "").partition(": ")
    return (reason, sentence) if reason in REASONS else None
