"""The product's scheduler process in front of the null engine. Runs as its own process:

    python -m orca.bench.host.scheduler_process STEP_US SCHEDULER FLAGS ...

It says `ready` on standard output once it holds the group's seat, and forms its group when a line comes in, so that
what it costs to start is not measured. Its last words are how many steps its engine has run, and the tokens drawn.
"""

import asyncio
import sys

from orca.bench.host.null_engine import NullEngine
from orca.core.domain.engine import Engine, EngineShape
from orca.core.domain.model import ModelInfo
from orca.scheduler import service
from orca.scheduler.settings import SchedulerSettings

SLOTS = 1 << 24
"""More than any batch that is measured takes: slots are not what bounds it."""


def main(arguments: list[str]) -> int:
    step_us, *flags = arguments
    engines: list[NullEngine] = []

    def make_engine(model: ModelInfo, settings: SchedulerSettings) -> Engine:
        shape = EngineShape(
            stages=1, slots=SLOTS, block_tokens=settings.block_tokens, max_model_len=model.max_model_len
        )
        engines.append(NullEngine(shape, vocab_size=model.vocab_size, step_us=int(step_us), may_form=_told_to_go))
        return engines[0]

    status = service.main(flags, make_engine)
    print(*(f"{engine.steps} {engine.tokens}" for engine in engines))
    return status


async def _told_to_go() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
