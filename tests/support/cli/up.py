"""An `orca up` as a user starts it, with all its processes."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import psutil

from support.cli.processes import is_running
from support.waiting import wait_until

UP_WITHIN_S = 90.0  # a shared two-core machine; alone it takes under ten
PROMPT = {"model": "orca-austen", "prompt": "It was a fine morning, and", "max_tokens": 12, "temperature": 0}


class Up:
    """One `orca up` of the small model on a free port."""

    def __init__(self, folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        """Start it. Args: environment: variables beside those of the tests."""
        self.folder = folder
        self._output = folder / "output"
        command = [sys.executable, "-m", "orca.cli.main", "up", "--port", "0", "--data", str(folder / "data"), *flags]
        variables = os.environ | (environment or {})
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=variables
            )
        self.seen: set[psutil.Process] = set()

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def url(self) -> str:
        return re.findall(r" at (http://\S+)", self.output)[0]

    def family(self) -> set[psutil.Process]:
        """All processes that it has ever been seen to have, ranks included."""
        if self.process.poll() is None:
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self.seen

    def wait_until(self, is_true: Callable[[], object]) -> None:
        wait_until(is_true, UP_WITHIN_S, lambda: self.output)

    def wait_until_ready(self) -> None:
        self.wait_until(lambda: "Ready:" in self.output or self.process.poll() is not None)
        assert "Ready:" in self.output, self.output
        self.family()

    def end(self) -> None:
        self.family()
        self.process.terminate()
        try:
            self.process.wait(UP_WITHIN_S)
        finally:
            self.process.kill()
            for child in self.seen:
                if is_running(child):
                    child.kill()


def completion(up: Up) -> str:
    answer = httpx.post(f"{up.url}/v1/completions", json=PROMPT, timeout=UP_WITHIN_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]
