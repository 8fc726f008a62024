"""Measures what the rest of Orca takes from the processors while ranks compute (planner.profile.profile.HostLoad).

A whole Orca runs the model for some seconds under three loads: few requests, many requests, and many short ones. The
processor time of each process is divided by the steps of that time. Ranks do not count: the profile has their times
already. Three loads give three parts: of a step, of each request in it, and of each answer.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from urllib.request import Request, urlopen

from orca.core.domain.errors import OrcaError
from orca.core.process.cpu_time import cpu_time_s
from orca.core.process.parent_death import die_with_parent
from orca.core.process.ports import free_port
from orca.core.process.process_tree import descendants
from orca.planner.profile.profile import HostLoad, ProcessorTime, ProfileKey
from orca.worker.controller.rank_process import RANK_COMMAND

_NEW_TOKENS_MAX = 240
_LOADS = ((2, _NEW_TOKENS_MAX), (24, _NEW_TOKENS_MAX), (24, 4))
"""Requests that run at the same time, and tokens of each answer."""
_STAGES_MAX = 2
_SLOTS = 16_384
_PROMPT_TOKENS_MAX = 16
_SETTLE_S_MAX = 2.0
"""Seconds of a load before it counts, or as many as it counts."""
_STEPS_MIN = 20
_STEPS_WITHIN_S = 300.0
_READY_WITHIN_S = 600.0
_STOP_WITHIN_S = 30.0
_ANSWER_S = 120.0


class HostLoadFailed(OrcaError):
    """The load of the host could not be measured; the message says why."""


Sample = tuple[float, float, float]
"""Requests of a step, those of them that run for the first time, and microseconds."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The counts of one load."""

    rows: float  # requests of a step on average
    entering: float  # requests that run for the first time in a step
    service_us: float  # processor time of a step
    controller_us: float  # the same of the controllers of all stages together


def is_needed(key: ProfileKey) -> bool:
    """Return whether the planned ranks leave no processor to the rest of Orca."""
    return key.device == "cpu" and key.devices * key.threads >= key.processors


def measure_host_load(model: Path, key: ProfileKey, *, seconds: float, report: Callable[[str], None]) -> HostLoad:
    """Measure it with `orca up` on this machine.

    Args:
        seconds: of all loads together.
        report: called with a line about the progress now and then.
    Raises: HostLoadFailed.
    """
    stages = min(key.devices, key.num_layers, _STAGES_MAX)
    report("the rest of Orca beside the ranks")
    with TemporaryDirectory(prefix="orca-host-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        with _running(model, key, stages, folder) as (url, pid):
            service = _Service(url, pid, folder / "log" / "scheduler-0.jsonl", key.max_model_len // 4)
            few, many, short = (
                service.sample(streams, new_tokens, seconds / len(_LOADS)) for streams, new_tokens in _LOADS
            )
    return HostLoad(
        service=parts_of(*((each.rows, each.entering, each.service_us) for each in (few, many, short))),
        controller=parts_of(*((each.rows, each.entering, each.controller_us / stages) for each in (few, many, short))),
    )


def parts_of(few: Sample, many: Sample, short: Sample) -> ProcessorTime:
    """Return the sum of three parts that three samples fit. A part that would be below 0 is 0."""
    width = many[0] - few[0]
    if width <= 0:
        return ProcessorTime(step_us=0.0, row_us=max(0.0, many[2] / many[0]), answer_us=0.0)
    # The line through the two long loads, at the rows of the short one, in answers and in time.
    share = (short[0] - few[0]) / width
    answers, us = (few[place] + share * (many[place] - few[place]) for place in (1, 2))
    answer_us = max(0.0, (short[2] - us) / (short[1] - answers)) if short[1] > answers else 0.0
    few_us, many_us = (each[2] - answer_us * each[1] for each in (few, many))
    row_us = max(0.0, (many_us - few_us) / width)
    step_us = max(0.0, few_us - row_us * few[0])
    return ProcessorTime(step_us=round(step_us, 1), row_us=round(row_us, 2), answer_us=round(answer_us, 1))


@contextmanager
def _running(model: Path, key: ProfileKey, stages: int, folder: Path) -> Iterator[tuple[str, int]]:
    """Run Orca. Yields: its URL, and the id of its first process."""
    port, output = free_port(), folder / "up.log"
    options: Mapping[str, object] = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "data": folder / "data",
        "stages": stages,
        "threads": key.threads,
        "dtype": key.dtype,
        "slots": _SLOTS,
        "iteration-log": folder / "log",
        **({} if key.quantization is None else {"quantization": key.quantization}),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with output.open("wb") as log:
        process = subprocess.Popen(
            die_with_parent([sys.executable, "-m", "orca.cli.main", "up", *words]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Options that the user has set for another `orca up` are not meant for this one.
            env={name: value for name, value in os.environ.items() if not name.startswith("ORCA_")},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise HostLoadFailed(f"`orca up` did not become ready: {_last_line(output)}")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class _Service:
    """An Orca that runs."""

    url: str
    pid: int  # of its first process
    log: Path  # iteration log of its scheduler
    tokens_max: int  # of a prompt, and of an answer

    def sample(self, streams: int, new_tokens: int, seconds: float) -> LoadSample:
        """Count steps and processor time under a load. Raises: HostLoadFailed if requests fail, or steps are too slow.

        Args: seconds: for this long, and longer if there are few steps.
        """
        with self._load(streams, new_tokens) as failures:
            time.sleep(min(_SETTLE_S_MAX, seconds))
            processes = {pid: _role(command) for pid, command in descendants(self.pid).items()}
            begin_ns, before = time.monotonic_ns(), {pid: cpu_time_s(pid) for pid in processes}
            time.sleep(seconds)
            while (counted := self._count_steps(begin_ns))[0] < _STEPS_MIN:
                if failures:
                    raise HostLoadFailed(f"a request failed: {failures[0]}")
                if time.monotonic_ns() - begin_ns > 1e9 * _STEPS_WITHIN_S:
                    raise HostLoadFailed(f"fewer than {_STEPS_MIN} steps within {_STEPS_WITHIN_S:g} s")
                time.sleep(0.1)
            if failures:
                raise HostLoadFailed(f"a request failed: {failures[0]}")
            used = {pid: cpu_time_s(pid) - before_s for pid, before_s in before.items()}
        steps, rows, entering = counted

        def per_step_us(role: str) -> float:
            return 1e6 * sum(each for pid, each in used.items() if processes[pid] == role) / steps

        return LoadSample(rows / steps, entering / steps, per_step_us("service"), per_step_us("controller"))

    def _count_steps(self, begin_ns: int) -> tuple[int, int, int]:
        """Return the steps that returned since a time, their requests, and those that ran for the first time.

        Args: begin_ns: of the clock that this process and the log share, that of the machine.
        """
        steps = rows = entering = 0
        known: set[str] = set()
        for line in self.log.read_text().splitlines()[:-1]:  # the last one may not be whole yet
            step = json.loads(line)
            requests = {row[0] for row in step["rows"]}
            if requests and begin_ns <= step["returned_ns"]:
                steps += 1
                rows += len(requests)
                entering += len(requests - known)
            known |= requests
        return steps, rows, entering

    @contextmanager
    def _load(self, streams: int, new_tokens: int) -> Iterator[list[str]]:
        """Send requests, so many at the same time. Yields: what has failed so far."""
        try:
            with urlopen(f"{self.url}/v1/models", timeout=_ANSWER_S) as answer:
                name = json.load(answer)["data"][0]["id"]
        except (OSError, HTTPException) as error:
            raise HostLoadFailed(f"the service does not tell its model: {error}") from error
        body = {
            "model": name,
            "prompt": [8] * min(_PROMPT_TOKENS_MAX, self.tokens_max),
            "max_tokens": min(new_tokens, self.tokens_max),
            "ignore_eos": True,
            "stream": True,
        }
        call = Request(f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        is_over, failures = Event(), list[str]()

        def stream() -> None:
            while not is_over.is_set():
                try:
                    with urlopen(call, timeout=_ANSWER_S) as answer:
                        while not is_over.is_set() and answer.readline():
                            pass
                except (OSError, HTTPException) as error:
                    failures.append(str(error))
                    return

        threads = [Thread(target=stream, daemon=True) for _ in range(streams)]
        for thread in threads:
            thread.start()
        try:
            yield failures
        finally:
            is_over.set()
            for thread in threads:
                thread.join(_ANSWER_S)


def _role(command: tuple[str, ...]) -> str:
    if RANK_COMMAND[-1] in command:
        return "rank"
    return "controller" if "worker" in command else "service"


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it wrote nothing"
