"""Once installed, the main job needs no network: a machine with nothing but a loopback device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WITHIN_S = 20.0

# Inside the namespace: start, wait until the first completion is whole, and end.
SERVE = """
import json, signal, subprocess, sys, time, urllib.request

def call(path, **body):
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"http://127.0.0.1:8000{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)

began = time.monotonic()
up = subprocess.Popen([sys.executable, "-m", "orca.cli.main", "up", "--data", sys.argv[1]], stdout=subprocess.DEVNULL)
while up.poll() is None:
    try:
        call("/ready")
        break
    except OSError:
        time.sleep(0.05)
ready_s = time.monotonic() - began
text = call("/v1/completions", prompt="It is a truth", max_tokens=8)["choices"][0]["text"]
print(json.dumps({"ready_s": ready_s, "whole_s": time.monotonic() - began, "text": text}))
up.send_signal(signal.SIGINT)
sys.exit(up.wait(60))
"""


@pytest.mark.prove
@pytest.mark.alone
def test_the_small_model_serves_within_twenty_seconds_without_a_network(tmp_path: Path) -> None:
    apart = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make network namespaces")
    ran = subprocess.run(
        [*apart, sys.executable, "-c", SERVE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(ran.stdout)
    print(f"ready after {told['ready_s']:.1f} s, first completion after {told['whole_s']:.1f} s")
    assert told["text"]
    assert told["whole_s"] < WITHIN_S, told
