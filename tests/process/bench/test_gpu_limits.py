"""The limit of a decode step, and the gap between two steps, of numbers made by hand."""

from itertools import pairwise

import pytest
import torch

from orca.bench.gpu.host_gap import STEPS, host_gap, profiled, step_gaps
from orca.bench.gpu.limits import DecodeOperation, decode_operations, limit_of, product_rates
from orca.bench.gpu.random_weights import RandomTensors
from orca.bench.gpu.shapes import LLAMA_8B, SMALL, made, random_tokens
from orca.bench.gpu.steps import BatchSteps
from orca.bench.kernels.clock import Clock


def test_each_operation_is_bound_by_its_bytes_or_by_its_product_and_the_limit_is_their_sum() -> None:
    operations = [
        DecodeOperation(name="moves", times=3, bytes=200),
        DecodeOperation(name="multiplies", bytes=100, product=(2, 5, 7)),
        DecodeOperation(name="reads weights", times=2, bytes=500, product=(1, 2, 3)),
    ]
    rates = {(2, 5, 7): 10.0, (1, 2, 3): 12.0}
    limit = limit_of(iter(operations), 100.0, lambda *shape: rates[shape])
    assert [each["seconds"] for each in limit.operations] == [6.0, 14.0, 10.0]
    assert limit.seconds == 30.0
    assert limit.by == "memory"


def test_a_step_of_8_billion_parameters_moves_its_weights_and_the_context_of_each_request() -> None:
    def moved(batch: int, context: int) -> int:
        return sum(each.times * each.bytes for each in decode_operations(LLAMA_8B, batch, context, torch.bfloat16))

    weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128_256
    assert weights == 7_504_658_432
    assert moved(1, 0) == pytest.approx(2 * weights, rel=1e-3)
    # Keys and values: 2 x 8 heads x 128 x 2 bytes in each of 32 layers.
    assert moved(64, 1024) - moved(64, 0) == 64 * 1024 * 131_072


def test_a_rate_is_measured_once_for_each_shape() -> None:
    flops_s = product_rates(Clock.of(torch.device("cpu"), 1), torch.float32)
    assert flops_s(2, 16, 8) == flops_s(2, 16, 8) > 0


def mark(number: int, begin: float, end: float) -> dict[str, object]:
    return {"cat": "user_annotation", "name": f"orca step {number}", "ts": begin, "dur": end - begin}


def kernel(number: int, ordered: float, begin: float, end: float, by: str = "cuda_runtime") -> list[dict[str, object]]:
    return [
        {"cat": by, "name": "launch", "ts": ordered, "dur": 1.0, "args": {"correlation": number}},
        {"cat": "kernel", "name": "some", "ts": begin, "dur": end - begin, "args": {"correlation": number}},
    ]


def test_a_gap_is_from_the_last_kernel_of_a_step_to_the_first_of_the_next() -> None:
    events = [
        mark(0, 0, 100),
        mark(1, 100, 200),
        mark(2, 200, 300),
        *kernel(7, ordered=10, begin=15, end=40),
        *kernel(8, ordered=20, begin=40, end=150),  # the device is behind the host
        *kernel(9, ordered=110, begin=170, end=180, by="cuda_driver"),
        *kernel(10, ordered=120, begin=185, end=210),
        *kernel(11, ordered=205, begin=210, end=400),
        *kernel(12, ordered=320, begin=500, end=600),  # of no step
        {"cat": "gpu_memcpy", "name": "copy", "ts": 155, "dur": 5, "args": {"correlation": 9}},
        {"name": "process_name", "ph": "M"},
    ]
    assert step_gaps(events) == [20e-6, 0.0]


def test_without_kernels_there_are_no_gaps() -> None:
    assert step_gaps([mark(0, 0, 100), mark(1, 100, 200)]) == []


def steps_of_one(new_tokens: int) -> BatchSteps:
    tensors = RandomTensors(dtype=torch.float32, device=torch.device("cpu"))
    prompts = [random_tokens(SMALL, 4, seed=1)]
    return BatchSteps(made(SMALL, tensors), prompts, whole=1, new_tokens=new_tokens, kv_deviation=1.0)


@pytest.mark.slow
def test_a_cpu_has_no_gap() -> None:
    steps = steps_of_one(2)
    assert host_gap(steps, torch.device("cpu")) is None
    steps.run(2)
    assert steps.taken == 2
    with pytest.raises(IndexError):
        steps.step()


def test_the_profiler_records_each_step() -> None:
    events = profiled(steps_of_one(STEPS), torch.device("cpu"))
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    assert [event["name"] for event in marks] == [f"orca step {number}" for number in range(STEPS)]
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(marks))
    # As a GPU would have it, each step's kernel 3 microseconds long and ordered in the middle of the step.
    for number, each in enumerate(marks):
        middle = each["ts"] + each["dur"] / 2
        events = [*events, *kernel(number, ordered=middle, begin=10.0 * number, end=10.0 * number + 3)]
    assert step_gaps(events) == pytest.approx([7e-6] * (STEPS - 1))
