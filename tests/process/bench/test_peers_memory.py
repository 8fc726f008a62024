"""The memory of processes as another process reads it, and the memory that ranks need."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orca.bench.peers.memory import (
    MemoryWatch,
    memory_of_ranks,
    memory_sizes,
    parent_id,
    process_name,
    slots_in_use,
)
from orca.bench.peers.model import LlamaShape, make_model
from orca.core.process.logs import JsonFormatter
from orca.planner.simulate.outcomes import RequestOutcome
from orca.worker.models.build import load_stage
from orca.worker.rank.kv_slots import slots_possible
from orca.worker.settings import WorkerSettings
from support.waiting import wait_until

TINY = LlamaShape(layers=2, hidden=48, heads=4, kv_heads=2, intermediate=80, vocab=300, positions=128)


def test_sizes_are_read_in_bytes_and_one_that_is_ending_has_none() -> None:
    status = "Name:\tpython\nVmHWM:\t   2048 kB\nVmRSS:\t 10 kB\nRssAnon:\t    1024 kB\n"
    assert memory_sizes(status) == (2048 * 1024, 1024 * 1024)
    assert memory_sizes("Name:\tpython\nState:\tZ (zombie)\n") is None


def test_a_parent_process_is_found_after_any_process_name() -> None:
    assert parent_id("17 (a) b (c) S 4 17 17 0") == 4


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-m", "orca.cli.main", "gateway", "--port", "1"], "gateway"),
        (["python", "-m", "orca.core.process.gc_freeze", "orca.worker.rank.rank", "7"], "rank"),
        (["python", "-m", "orca.bench.peers.openvino_peer", "f32"], "openvino_peer"),
        (["/somewhere/redis-server 127.0.0.1:6379"], "redis-server"),
        ([""], ""),
    ],
)
def test_processes_have_readable_names(command: list[str], name: str) -> None:
    assert process_name(command) == name


def test_a_watch_sees_the_peak_of_a_child_of_the_process() -> None:
    takes = "import time; block = bytearray(64 << 20); del block; print('done', flush=True); time.sleep(60)"
    parent = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
        "sys.stdin.read(); child.kill(); child.wait()"
    )
    watch = MemoryWatch()
    command = [sys.executable, "-c", parent, takes]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        watch.follow(process.pid)
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        wait_until(lambda: len(watch.peaks) == 2, 30.0)
        watch.stop()
        assert watch.peaks_of_running == watch.peaks
        process.communicate()
    ours, child = watch.peaks
    assert child.whole_bytes > 64 << 20 > ours.whole_bytes
    assert 0 < ours.anonymous_bytes < ours.whole_bytes


def outcome(prompt_tokens: int, *token_s: float) -> RequestOutcome:
    return RequestOutcome(
        index=0,
        prompt_tokens=prompt_tokens,
        new_tokens=len(token_s),
        arrival_s=0.0,
        sent_s=0.0,
        token_s=token_s,
        end_s=token_s[-1],
    )


def test_slots_in_use_are_whole_blocks_of_what_runs_at_the_same_time() -> None:
    # 16 slots, from the second token on 32; then 16, and 48, that do not meet it or each other.
    first, second, third = outcome(16, 1.0, 2.0, 3.0), outcome(5, 2.5, 4.0), outcome(40, 5.0)
    assert slots_in_use([first], 16) == 32
    assert slots_in_use([first, second], 16) == 48
    assert slots_in_use([first, second, third], 16) == 48
    assert slots_in_use([], 16) == 0


def test_the_log_of_a_rank_has_its_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model(tmp_path, TINY)
    model = load_stage(tmp_path)
    settings = WorkerSettings(model=str(tmp_path), slots_max=64)
    with caplog.at_level(logging.INFO):
        slots_possible(settings, model, torch.device("cpu"))
    row = JsonFormatter("worker-0-rank-0").format(caplog.records[-1]).encode()
    # A rank that was started again says it twice; two stages have a file each.
    held = memory_of_ranks({"worker-0.0.log": [b"no JSON", row, row], "worker-0.1.log": [row]}, slots=32)
    assert held.weight_bytes == 2 * model.weight_bytes
    assert held.kv_bytes_per_slot == 2 * model.kv_bytes_per_slot
    assert held.bytes == held.weight_bytes + 32 * held.kv_bytes_per_slot
