"""The files of a model that nobody computes with, and the fetch as a process."""

import json
import os
import random
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from support.waiting import wait_until

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
}
WEIGHTS_BYTES = 3 << 20
LIMIT_S = 60.0


def model_files(weights_bytes: int = WEIGHTS_BYTES) -> dict[str, bytes]:
    """A servable folder, as far as its headers tell."""
    weights = struct.pack("<Q", 2) + b"{}" + random.Random(7).randbytes(weights_bytes)
    return {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}", "model.safetensors": weights}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file in the folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class FetchProcess:
    """`orca fetch` with its internal port open."""

    running: ClassVar[list["FetchProcess"]] = []  # of this test; what a failed one leaves is killed behind it

    def __init__(self, uri: str, into: Path, variables: Mapping[str, str], *options: str) -> None:
        command = [sys.executable, "-m", "orca.cli.main", "fetch", "--uri", uri, "--into", str(into)]
        options = ("--listen", "127.0.0.1:0", "--log-format", "json", "--tries", "2", *options)
        environment = {**os.environ, "HF_HOME": str(into.parent / "home"), "HF_TOKEN": "", **variables}
        self._process = subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True)
        self._first_line = ""
        self.running.append(self)

    def progress(self) -> dict[str, Any]:
        """Return the answer of /progress."""
        assert self._process.stderr is not None
        self._first_line = self._first_line or self._process.stderr.readline()
        address = json.loads(self._first_line)["address"]
        with urllib.request.urlopen(f"http://{address}/progress", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def wait_for_bytes(self, count: int) -> None:
        wait_until(lambda: self.progress()["bytes_done"] >= count, LIMIT_S)

    def kill(self) -> None:
        assert self._process.stderr is not None
        self._process.kill()
        self._process.wait()
        self._process.stderr.close()

    def terminate(self) -> tuple[int, str]:
        self._process.terminate()
        return self.end()

    def succeed(self) -> None:
        code, said = self.end()
        assert code == 0, said

    def end(self) -> tuple[int, str]:
        """Exit code and last line."""
        _, said = self._process.communicate(timeout=LIMIT_S)
        return self._process.returncode, [*said.splitlines(), self._first_line][-1 if not said else -2]
