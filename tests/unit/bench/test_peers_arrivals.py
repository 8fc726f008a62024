"""Requests that come one by one: when they are handed out, and peers that are driven that way."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from orca.bench.peers import openvino_peer, vllm_peer
from orca.bench.peers.arrivals import Arrivals, serve
from orca.bench.peers.workload import PeerWorkload

STEP_S = 1 / 64
"""Time of a step. Arrivals are whole numbers of 1/16, so sums of both are exact."""


class Clock:
    """Time that passes by sleeping, and by what a test says."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def workload(*arrivals_s: float, new_tokens: int = 2, prompt_tokens: int = 1) -> PeerWorkload:
    requests = len(arrivals_s)
    return PeerWorkload(
        model="m",
        prompts=[[number] * prompt_tokens for number in range(requests)],
        new_tokens=[new_tokens] * requests,
        batch_size=2,
        threads=1,
        arrivals_s=list(arrivals_s),
    )


def test_a_request_is_handed_out_once_after_its_arrival() -> None:
    clock = Clock()
    arrivals = Arrivals(workload(0.0, 0.5, 0.5, 2.0), clock_s=clock, sleep=clock.sleep)
    assert arrivals.take() == [0]
    assert arrivals.take() == []
    arrivals.wait()
    assert clock.now_s == pytest.approx(100.5)
    assert arrivals.take() == [1, 2]
    assert arrivals.has_more
    clock.now_s += 5.0
    arrivals.wait()  # it has come long ago
    assert clock.now_s == pytest.approx(105.5)
    assert arrivals.take() == [3]
    assert not arrivals.has_more


def test_times_of_tokens_count_from_the_arrival() -> None:
    clock = Clock()
    arrivals = Arrivals(workload(0.0, 0.5), clock_s=clock, sleep=clock.sleep)
    clock.now_s += 0.75
    arrivals.record_tokens([0, 1])
    clock.now_s += 0.25
    arrivals.record_tokens([1])
    assert arrivals.first_s == pytest.approx([0.75, 0.25])
    assert arrivals.last_s == pytest.approx([0.75, 0.5])


class FakeHandle:
    def __init__(self, number: int, count: int) -> None:
        self.number = number
        self.count = count  # tokens still to come
        self.unread: list[int] = []

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, "FakeOutput"]:
        return {0: FakeOutput([self.unread.pop(0)])}


class FakeOutput:
    def __init__(self, generated_ids: list[int]) -> None:
        self.generated_ids = generated_ids


class FakePipeline:
    """One token to everybody in each step: its request's number."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.handles: list[FakeHandle] = []
        self.steps_of: list[list[int]] = []

    def add_request(self, number: int, prompt: list[int], count: int) -> FakeHandle:
        assert prompt == [number]
        self.handles.append(FakeHandle(number, count))
        return self.handles[-1]

    def has_non_finished_requests(self) -> bool:
        return any(handle.count for handle in self.handles)

    def step(self) -> None:
        running = [handle for handle in self.handles if handle.count]
        assert running, "a step without requests"
        self.clock.sleep(STEP_S)
        self.steps_of.append([handle.number for handle in running])
        for handle in running:
            handle.unread.append(handle.number)
            handle.count -= 1


def test_openvino_gets_requests_when_they_arrive_and_is_not_called_between_them() -> None:
    clock = Clock()
    pipeline, paced = FakePipeline(clock), workload(0.0, 0.0, 1 / 16)
    arrivals = Arrivals(paced, clock_s=clock, sleep=clock.sleep)
    requests = [([number], 2) for number in range(3)]
    answer = serve(paced, openvino_peer.OpenVinoPipeline(pipeline, paced, requests), arrivals)
    assert pipeline.steps_of == [[0, 1], [0, 1], [2], [2]]
    assert answer["tokens"] == [[0, 0], [1, 1], [2, 2]]
    assert all(0 < first <= last for first, last in zip(answer["first_s"], answer["last_s"], strict=True))


class FakeEngine:
    """vLLM's engine as far as it is used: every step gives each request its number; one that has just come waits."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.left: dict[str, int] = {}
        self.new: set[str] = set()
        self.steps_of: list[list[str]] = []

    def add_request(self, request_id: str, prompt: dict[str, list[int]], count: int) -> None:
        assert prompt == {"prompt_token_ids": [int(request_id)]}
        self.left[request_id] = count
        self.new.add(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[SimpleNamespace]:
        assert self.left, "a step without requests"
        self.clock.sleep(STEP_S)
        self.steps_of.append(list(self.left))
        came = [
            SimpleNamespace(
                request_id=name,
                outputs=[SimpleNamespace(token_ids=[] if name in self.new else [int(name)])],
            )
            for name in self.left
        ]
        for name in set(self.left) - self.new:
            self.left[name] -= 1
        self.left = {name: count for name, count in self.left.items() if count}
        self.new.clear()
        return came


def test_vllm_gets_requests_when_they_arrive_and_is_not_called_between_them() -> None:
    clock = Clock()
    engine, paced = FakeEngine(clock), workload(0.0, 0.0, 1 / 16)
    arrivals = Arrivals(paced, clock_s=clock, sleep=clock.sleep)
    answer = serve(paced, vllm_peer.VllmEngine(engine, paced, lambda count: count), arrivals)
    assert engine.steps_of == [["0", "1"]] * 3 + [["2"]] * 3
    assert answer["tokens"] == [[0, 0], [1, 1], [2, 2]]
    assert all(0 < first <= last for first, last in zip(answer["first_s"], answer["last_s"], strict=True))


def test_vllm_has_the_threads_and_the_cache_of_the_comparison(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    asked = replace(workload(0.0, 0.0, prompt_tokens=10), model=str(tmp_path))
    variables = vllm_peer.variables(asked)
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "1"
    command = vllm_peer.server_command(asked, port=9)
    wanted = {"--model": str(tmp_path), "--dtype": "float32", "--max-num-seqs": "2", "--max-model-len": "12"}
    assert {flag: command[command.index(flag) + 1] for flag in wanted} == wanted
    assert command[command.index("--port") + 1] == "9"


LLAMA = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 12}
GPT2 = {"n_embd": 512, "n_head": 8, "n_layer": 12}


@pytest.mark.parametrize(
    ("config", "prompt_tokens", "gib"),
    [
        (GPT2, 10, 1),  # 49,152 bytes a token
        (GPT2, 10_910, 1),  # two requests, each with two new tokens: 341 blocks of 32
        (GPT2, 10_911, 2),
        (LLAMA, 10_911, 1),
        (LLAMA | {"head_dim": 256}, 10_911, 2),
    ],
)
def test_the_cache_of_a_peer_holds_a_full_batch_of_the_longest_requests(
    config: dict[str, int], prompt_tokens: int, gib: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = replace(workload(0.0, prompt_tokens=prompt_tokens), model=str(tmp_path))
    assert asked.cache_gib(32) == gib
