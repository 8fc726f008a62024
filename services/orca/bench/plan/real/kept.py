"""Measured runs in a file, one line of JSON each, so that a long bench that ended early goes on where it was."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import orjson

from orca.bench.plan.real.run import RealFigures
from orca.core.strict_record import record_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """All that decides a run on a machine."""

    model: str
    task: str
    options: tuple[str, ...]  # of `orca up`
    requests: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """A line of the file."""

    key: RunKey
    figures: RealFigures


class KeptRuns:
    """The runs of a file, by their keys."""

    def __init__(self, file: Path | None) -> None:
        """Args: file: None: keep runs in memory only. Raises: SettingError for a line that is not a run."""
        self._file = file
        self._runs: dict[RunKey, RealFigures] = {}
        if file is None or not file.exists():
            return
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            run = record_from_json(KeptRun, line, f"{file}, line {number}")
            self._runs[run.key] = run.figures
        if whole != content:  # a bench was killed while it wrote
            file.write_bytes(whole)

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, key: RunKey) -> RealFigures | None:
        """Return the figures of a run; None if it was not measured yet."""
        return self._runs.get(key)

    def add(self, key: RunKey, figures: RealFigures) -> None:
        """Keep a run."""
        self._runs[key] = figures
        if self._file is not None:
            line = orjson.dumps(dataclasses.asdict(KeptRun(key=key, figures=figures)))
            with self._file.open("ab") as file:
                file.write(line + b"\n")
