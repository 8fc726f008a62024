"""`orca up` with and without the prefix cache, and what it computed: counted in the iteration log, not by itself."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from orca.bench.client import LoadTarget
from orca.bench.peers.memory import MemoryWatch
from orca.bench.system import running_system
from orca.core.domain.errors import SettingError
from orca.scheduler.policy.batch import Phase

_OWN_OPTIONS = ("--prefix-cache", "--iteration-log")


class CacheUse(StrEnum):
    """A variant of `orca up`."""

    ON = "with"
    OFF = "without"

    @property
    def words(self) -> list[str]:
        return ["--prefix-cache", "true" if self is CacheUse.ON else "false"]


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model under measurement, and the options of `orca up` besides those of the cache."""

    folder: Path
    vocab_size: int
    up_options: Sequence[str]

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(slots=True)
class RunningOrca:
    """A system that runs."""

    target: LoadTarget
    logs: Path  # folder of the iteration logs
    memory: MemoryWatch
    process: int  # of `orca up`

    def prompt_tokens_by_epoch(self) -> Counter[int]:
        """Return the tokens that were computed of prompts so far; after a repair, also of answers."""
        return prompt_tokens_by_epoch(self._lines())

    def beginnings(self, after: int) -> dict[str, int]:
        """See the function. Args: after: number of an epoch."""
        return beginnings(self._lines(), after)

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_tokens_by_epoch().total()

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines of the schedulers' iteration logs."""
        for file in self.logs.glob("scheduler*.jsonl"):
            yield from file.read_bytes().splitlines()


def check_up_options(up_options: Sequence[str]) -> None:
    """Check that no option of the caller is one that the bench sets. Raises: SettingError."""
    for name in _OWN_OPTIONS:
        if any(word == name or word.startswith(f"{name}=") for word in up_options):
            raise SettingError(f"{name} is set by this bench: leave it out")


@asynccontextmanager
async def running_orca(model: MeasuredModel, cache: CacheUse) -> AsyncIterator[RunningOrca]:
    """Run `orca up` with a new pool and a new cache. Raises: ServerFailed."""
    watch, processes = MemoryWatch(), []

    def on_start(process: int) -> None:
        processes.append(process)
        watch.follow(process)

    with TemporaryDirectory(prefix="orca-turns-") as name:
        folder = Path(name)
        logs = folder / "iterations"
        options = [*model.up_options, *cache.words, "--iteration-log", str(logs)]
        system = running_system(str(model.folder), options, folder, vocab_size=model.vocab_size, on_start=on_start)
        try:
            async with system as target:
                yield RunningOrca(target, logs, watch, processes[0])
        finally:
            watch.stop()


def prompt_tokens_by_epoch(lines: Iterable[bytes]) -> Counter[int]:
    """Count the rows of a scheduler's iteration log that run known tokens. Returns: tokens by number of the epoch."""
    found: Counter[int] = Counter()
    for line in lines:
        step = orjson.loads(line)
        found[step["epoch"]] += sum(count for _, phase, _, count, *_ in step["rows"] if phase == Phase.INITIATION)
    return found


def beginnings(lines: Iterable[bytes], after: int) -> dict[str, int]:
    """Return the first position that each request computed in the epochs after one: the cache had those before it."""
    found: dict[str, int] = {}
    for line in lines:
        step = orjson.loads(line)
        if step["epoch"] > after:
            for request, _, start, *_ in step["rows"]:
                found.setdefault(request, start)
    return found
