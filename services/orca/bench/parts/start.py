"""Measure starts: `python -m orca.bench.parts.start MODEL_FOLDER --starts 5 [OPTIONS OF orca up]`.

It prints the seconds from the command to a client's first token for each start, then their median and range. The client
sends requests from the beginning. The first start on a machine compiles kernels and times layouts, and keeps the
results for the next ones (`~/.cache/orca`). With an empty XDG_CACHE_HOME the first start can be measured again.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from orca.core.process.parent_death import die_with_parent
from orca.core.process.ports import free_port

ASK_EVERY_S = 0.02
ANSWER_S = 120.0


def seconds_of_a_start(model: str, options: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory() as data:
        port = free_port()
        words = ["up", "--model", model, "--served-name", "model", "--port", str(port), "--data", data, *options]
        # A user's environment: with bytecode kept.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        began = time.monotonic()
        command = die_with_parent([sys.executable, "-m", "orca.cli.main", *words])
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, start_new_session=True)
        try:
            while not _has_token(port):
                if process.poll() is not None:
                    raise SystemExit(f"`orca up` ended with {process.returncode}")
                time.sleep(ASK_EVERY_S)
            return time.monotonic() - began
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def _has_token(port: int) -> bool:
    body = {"model": "model", "prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return bool(json.load(answer)["usage"]["completion_tokens"] == 1)
    except urllib.error.HTTPError as error:
        # The model is not in force in the pool yet. Any other error is permanent.
        if error.code != 503:
            raise
        return False
    except OSError:
        return False


def main(model: str, starts: int, options: Sequence[str]) -> None:
    took = []
    for _ in range(starts):
        took.append(seconds_of_a_start(model, options))
        print(f"{took[-1]:.2f} s", flush=True)
    print(f"median {statistics.median(took):.2f} s, {min(took):.2f} to {max(took):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Seconds until the first token of `orca up`.", allow_abbrev=False)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--starts", type=int, default=5)
    known, rest = parser.parse_known_args()
    main(known.model, known.starts, rest)
