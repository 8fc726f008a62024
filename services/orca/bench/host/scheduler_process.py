"""The product's scheduler process with the null engine. Runs as its own process:

    python -m orca.bench.host.scheduler_process STEP_US SCHEDULER FLAGS ...

The process prints `ready` to standard output when it holds the group's seat. It forms its group when a line arrives on
standard input, so that its start is not measured. At its end it prints the number of steps and of tokens of its engine.
"""

import asyncio
import sys

from orca.bench.host.null_engine import NullEngine
from orca.core.domain.engine import Engine, EngineShape
from orca.core.domain.model import ModelInfo
from orca.scheduler import service
from orca.scheduler.settings import SchedulerSettings

SLOTS = 1 << 24
"""More slots than any measured batch needs, so that slots never limit it."""


def main(arguments: list[str]) -> int:
    step_us, *flags = arguments
    engines: list[NullEngine] = []

    def make_engine(model: ModelInfo, settings: SchedulerSettings) -> Engine:
        shape = EngineShape(
            stages=1, slots=SLOTS, block_tokens=settings.block_tokens, max_model_len=model.max_model_len
        )
        engines.append(
            NullEngine(shape, vocab_size=model.vocab_size, step_us=int(step_us), before_forming=_wait_for_start)
        )
        return engines[0]

    status = service.main(flags, make_engine)
    print(*(f"{engine.steps} {engine.tokens}" for engine in engines))
    return status


async def _wait_for_start() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
