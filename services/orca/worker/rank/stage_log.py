"""The iteration log of a stage: one JSON line for each step, with its rows and its times (ORCA, Figure 8)."""

from pathlib import Path

import orjson

from orca.core.domain.step import StageTiming, Step
from orca.core.process.line_file import LineFile


class StageLog:
    """The file of one stage. Pictures of the pipeline are drawn from it."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, step: Step, timing: StageTiming) -> None:
        line = {
            "stage": timing.stage,
            "epoch": step.epoch.number,
            "step": step.number,
            "handles": [row.handle for row in step.rows],
            "new": [new.request_id for new in step.new],
            "freed": list(step.freed),
            "kept": list(step.kept),
            "tokens": step.tokens,
            "received_ns": timing.received_ns,
            "start_ns": timing.start_ns,
            "end_ns": timing.end_ns,
        }
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        self._file.close()
