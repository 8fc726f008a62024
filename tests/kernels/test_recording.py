"""A recording replays with other numbers: it builds a step's inputs from the state of the requests on the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from orca.kernels.contract.recording import Recorder, RecordingSize, RequestLines, StepDescription, StepInputs
from orca.kernels.contract.reference import ContextRow, attend_reference
from orca.kernels.cpu.recording import CpuRecorder
from orca.kernels.device import kernels_of
from orca.kernels.gpu.attention import SPLIT
from orca.kernels.gpu.kernels import TritonKernels
from orca.kernels.gpu.recording import GraphInputs, GraphRecorder
from support.kernels.attention_steps import random_bias, random_cross_step, random_step, view_of
from support.kernels.gpu import DEVICE

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
HEADS = [0, 0, 1, 1]
RECORDERS = {"cpu": (CPU, kernels_of(CPU).recorder(CPU)), "gpu": (DEVICE, GraphRecorder(DEVICE))}


@pytest.fixture(params=RECORDERS)
def there(request: pytest.FixtureRequest) -> tuple[torch.device, Recorder]:
    device, recorder = RECORDERS[request.param]
    assert recorder is not None
    return device, recorder


def lines_of(tables: Tensor, device: torch.device, prompts: int = 1) -> RequestLines:
    numbers = torch.arange(len(tables), device=device)
    return RequestLines(tables.to(device), last_tokens=100 + numbers, prompts=prompts + 0 * numbers)


def alone(said: list[tuple[int, int, int, int]]) -> StepDescription:
    """Return rows of requests that run one token each: line, position, token, block."""
    return StepDescription(np.array([(*each, 1, 1) for each in said]), len(said))


def laid_out(recorder: Recorder, inputs: StepInputs, said: list[tuple[int, int, int, int]]) -> None:
    inputs.put(alone(said))

    def compute() -> tuple[Tensor | None, ...]:
        inputs.build()
        return ()

    _, run = recorder.record(compute)
    run()


def test_inputs_are_built_from_the_step_and_the_kept_state(there: tuple[torch.device, Recorder]) -> None:
    device, recorder = there
    expected = [[4, -1, -1], [-1] * 3, [-1] * 3, [7, 2, 6], [-1, 1, -1]]
    tables = torch.tensor(expected).int()
    if isinstance(recorder, GraphRecorder):  # elsewhere the host has put the blocks into its own tables
        tables[3, 2] = tables[0, 0] = tables[4, 1] = -1
    lines = lines_of(tables, device)
    inputs = recorder.inputs(RecordingSize(3, None), lines, slots=160, block_tokens=BLOCK_TOKENS)
    laid_out(recorder, inputs, [(3, 33, 55, 6), (0, 0, -1, 4), (4, 19, -1, 1)])
    assert inputs.ids.tolist() == [55, 100, 104]
    assert inputs.positions.tolist() == [33, 0, 19]
    assert inputs.slots.tolist() == [6 * 16 + 1, 4 * 16 + 0, 1 * 16 + 3]
    assert lines.tables.tolist() == expected


@pytest.mark.parametrize("window", [None, 3, SPLIT + 5])
def test_a_recording_computes_the_given_step(window: int | None, there: tuple[torch.device, Recorder]) -> None:
    device, recorder = there
    contexts = [(5, 1), (2 * SPLIT + 9, 1), (1, 1), (SPLIT, 1), (SPLIT + 1, 1)]
    qkv, cache, rows, tables = random_step(contexts, 4, 2, 12, torch.float32, BLOCK_TOKENS)
    lines = lines_of(tables.clone(), device)
    there_qkv, there_cache = qkv.to(device), cache.to(device)
    size = RecordingSize(len(rows), None)
    inputs = recorder.inputs(size, lines, slots=len(cache) * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
    attention = inputs.attention(view_of(lines.tables, HEADS, 12, torch.float32, BLOCK_TOKENS, window=window))

    def compute() -> tuple[Tensor | None, ...]:
        inputs.build([there_qkv])
        return (attention(there_qkv, there_cache, 0.3),)

    (output,), run = recorder.record(compute)
    assert output is not None
    for order in ([0, 1, 2, 3, 4], [2, 4, 3, 0, 1]):
        chosen = [rows[place] for place in order]
        said = [(row.line, row.position, 1, tables[row.line, row.position // BLOCK_TOKENS]) for row in chosen]
        inputs.put(alone(said))
        output.fill_(float("nan"))
        run()
        own = [ContextRow(place, 1, row.position, row.line) for place, row in enumerate(chosen)]
        expected = attend_reference(qkv[:, :4], cache, own, tables, HEADS, scale=0.3, window=window)
        torch.testing.assert_close(output.cpu(), expected.flatten(1), atol=2e-6, rtol=2e-6)


def chunked(
    step: list[tuple[int, int, int, bool]], tables: Tensor
) -> tuple[StepDescription, list[ContextRow], list[int]]:
    """Describe a step on a CPU. Args: step: for each request its line, position, tokens, and whether it draws.

    Returns: with it the rows, and the flat rows that are wanted. Token `i` of the step is 1000 + i; of those that run
        alone, the ones at odd positions are fed.
    """
    said, rows, chunks, wanted, first = [], [], [], [], 0
    for line, position, count, is_wanted in step:
        rows.append(ContextRow(first, count, position, line))
        token = 1000 + first if count == 1 and position % 2 == 0 else -1
        block = int(tables[line, (position + count - 1) // BLOCK_TOKENS])
        said.append((line, position, token, block, count, is_wanted))
        if count > 1:
            chunks.append((first, tuple(range(1000 + first, 1000 + first + count))))
        first += count
        if is_wanted:
            wanted.append(first - 1)
    return StepDescription(np.array(said, np.int64), first, len(wanted), chunks), rows, wanted


@pytest.mark.parametrize("window", [None, 3, SPLIT + 5])
def test_a_recording_on_a_cpu_computes_steps_with_chunks_of_any_size(window: int | None) -> None:
    recorder = CpuRecorder()
    contexts = [(40, 1)] * 3 + [(2 * SPLIT + 9, 1), (90, 1)]  # whose blocks the steps below use as they like
    _, cache, _, tables = random_step(contexts, 4, 2, 12, torch.float32, BLOCK_TOKENS)
    lines = lines_of(tables.clone(), CPU)
    inputs = recorder.inputs(RecordingSize(200, 16), lines, slots=len(cache) * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
    view = view_of(lines.tables, HEADS, 12, torch.float32, BLOCK_TOKENS, window=window)
    attention, wanted_only = inputs.attention(view), inputs.attention(view, wanted_only=True)
    qkv = torch.zeros(200, 8, 12)
    kernels = kernels_of(CPU)

    def compute() -> tuple[Tensor | None, ...]:
        inputs.build([qkv])
        assert inputs.wanted is not None
        return attention(qkv, cache, 0.3), wanted_only(kernels.take_rows(qkv, inputs.wanted), cache, 0.3)

    (output, behind), run = recorder.record(compute)
    assert output is not None
    assert behind is not None
    steps = [
        [(3, 100, 70, True), (0, 7, 1, True), (1, 8, 1, True), (4, 0, 90, False)],
        [(4, 12, 5, True)],
        [(0, 0, 33, False), (2, 35, 2, True), (3, 2 * SPLIT, 9, False), (1, 20, 1, False), (4, 88, 1, True)],
        [(place, 10 + place, 1, place < 3) for place in range(5)],
    ]
    for step in steps:
        said, rows, wanted = chunked(step, tables)
        tokens = said.tokens
        qkv[:tokens] = torch.randn(tokens, 8, 12)
        inputs.put(said)
        output[:], behind[:] = torch.nan, torch.nan
        run()
        expected = attend_reference(qkv[:tokens, :4], cache, rows, tables, HEADS, scale=0.3, window=window).flatten(1)
        torch.testing.assert_close(output[:tokens], expected, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(behind[: len(wanted)], expected[wanted], atol=2e-6, rtol=2e-6)
        assert output[tokens:].isnan().all()
        assert behind[len(wanted) :].isnan().all()
        own = [(row.line, row.position + done) for row in rows for done in range(row.count)]
        assert inputs.positions[:tokens].tolist() == [place for _, place in own]
        slots = [int(tables[line, at // BLOCK_TOKENS]) * BLOCK_TOKENS + at % BLOCK_TOKENS for line, at in own]
        assert inputs.slots[:tokens].tolist() == slots
        last_tokens = {row.first: 100 + row.line for row in rows if row.count == 1 and row.position % 2}
        assert inputs.ids[:tokens].tolist() == [last_tokens.get(place, 1000 + place) for place in range(tokens)]
    assert torch.equal(lines.tables, tables)


def test_a_recording_attends_to_the_sources_of_its_rows(there: tuple[torch.device, Recorder]) -> None:
    """The numbers of keys are those of the lines' prompts, whatever the positions of the targets are."""
    device, recorder = there
    sources = [5, 2 * SPLIT + 9, 1, SPLIT, SPLIT + 1]
    queries, cache, _, tables = random_cross_step([(n, 1, 30) for n in sources], 4, 2, 12, torch.float32, 16)
    own = torch.arange(15).view(5, 3).int().to(device)
    lengths, numbers = torch.tensor(sources, device=device), torch.arange(5, device=device)
    lines = RequestLines(own, numbers, numbers, tables.to(device), lengths)
    there_queries, there_cache = queries.to(device), cache.to(device)
    inputs = recorder.inputs(RecordingSize(5, None), lines, slots=len(cache) * 16, block_tokens=16)
    assert lines.source_tables is not None
    attention = inputs.attention(view_of(lines.source_tables, HEADS, 12, torch.float32, 16, is_causal=False))

    def compute() -> tuple[Tensor | None, ...]:
        inputs.build([there_queries])
        return (attention(there_queries, there_cache, 0.3),)

    (output,), run = recorder.record(compute)
    assert output is not None
    for order in ([0, 1, 2, 3, 4], [2, 4, 3, 0, 1]):
        inputs.put(alone([(line, 30, 1, 0) for line in order]))
        output.fill_(float("nan"))
        run()
        chosen = [ContextRow(place, 1, 30, line, sources[line]) for place, line in enumerate(order)]
        expected = attend_reference(queries, cache, chosen, tables, HEADS, scale=0.3, is_causal=False)
        torch.testing.assert_close(output.cpu(), expected.flatten(1), atol=2e-6, rtol=2e-6)


def test_a_recording_on_a_cpu_attends_to_sources_in_chunks_and_wanted_rows() -> None:
    """Self attention and cross attention of the same rows; the keys of both are in one cache."""
    recorder = CpuRecorder()
    contexts, sources = [(40, 1)] * 3 + [(300, 1), (90, 1)], [1, 256, 40, 257, 600]
    _, own, _, tables = random_step(contexts, 4, 2, 12, torch.float32, BLOCK_TOKENS)
    _, others, _, source_tables = random_cross_step([(n, 1, 0) for n in sources], 4, 2, 12, torch.float32, BLOCK_TOKENS)
    cache, source_tables = torch.cat((own, others)), (source_tables + len(own)).contiguous()
    lengths, bias = torch.tensor(sources), random_bias(4, 9, 8)
    lines = RequestLines(tables, torch.arange(5), torch.arange(5), source_tables, lengths)
    inputs = recorder.inputs(RecordingSize(200, 16), lines, slots=len(cache) * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
    causal = view_of(tables, HEADS, 12, torch.float32, BLOCK_TOKENS)
    views = [causal, replace(causal, tables=source_tables, is_causal=False)]
    everyone, wanted_only = ([inputs.attention(view, wanted_only=only) for view in views] for only in (False, True))
    qkv, queries = torch.zeros(200, 8, 12), torch.zeros(200, 4, 12)
    kernels = kernels_of(CPU)

    def compute() -> tuple[Tensor | None, ...]:
        inputs.build([qkv, queries])
        assert inputs.wanted is not None
        some, asking = kernels.take_rows(qkv, inputs.wanted), kernels.take_rows(queries, inputs.wanted)
        return (
            everyone[0](qkv, cache, 0.3, bias),
            everyone[1](queries, cache, 0.3),
            wanted_only[0](some, cache, 0.3, bias),
            wanted_only[1](asking, cache, 0.3),
        )

    outputs, run = recorder.record(compute)
    steps = [
        [(line, 10 + line, 1, line != 2) for line in range(5)],
        [(3, 0, 1, True)],
        [(4, 3, 80, True), (0, 7, 1, True), (3, 100, 70, False), (1, 0, 2, True)],
    ]
    for step in steps:
        said, rows, wanted = chunked(step, tables)
        tokens = said.tokens
        qkv[:tokens], queries[:tokens] = torch.randn(tokens, 8, 12), torch.randn(tokens, 4, 12)
        inputs.put(said)
        for output in outputs:
            assert output is not None
            output[:] = torch.nan
        run()
        crossing = [replace(row, keys=sources[row.line]) for row in rows]
        expected = [
            attend_reference(qkv[:tokens, :4], cache, rows, tables, HEADS, scale=0.3, bias=bias),
            attend_reference(queries[:tokens], cache, crossing, source_tables, HEADS, scale=0.3, is_causal=False),
        ]
        for each, output, behind in zip(expected, outputs[:2], outputs[2:], strict=True):
            assert output is not None
            assert behind is not None
            torch.testing.assert_close(output[:tokens], each.flatten(1), atol=2e-6, rtol=2e-6)
            torch.testing.assert_close(behind[: len(wanted)], each[wanted].flatten(1), atol=2e-6, rtol=2e-6)
            assert output[tokens:].isnan().all()


def test_padding_rows_change_no_request() -> None:
    recorder = GraphRecorder(DEVICE)
    tables = torch.arange(12).view(4, 3).int()
    lines = lines_of(tables, DEVICE, prompts=7)
    inputs = recorder.inputs(RecordingSize(8, None), lines, slots=160, block_tokens=BLOCK_TOKENS)
    assert isinstance(inputs, GraphInputs)
    laid_out(recorder, inputs, [(place % 4, place, 3, 0) for place in range(8)])
    laid_out(recorder, inputs, [(2, 20, -1, 7), (1, 8, 5, 3)])
    assert inputs.slots.tolist() == [7 * 16 + 4, 3 * 16 + 8, *[-1] * 6]
    lines_of_rows, indices = inputs.sampled
    assert lines_of_rows.tolist() == [2, 1, *[-1] * 6]
    assert inputs.ids.tolist() == [102, 5, *[0] * 6]
    assert indices[:2].tolist() == [20 + 1 - 7, 8 + 1 - 7]
    assert lines.tables[3].tolist() == [0, 10, 11]


def test_at_most_an_eighth_of_the_rows_is_padding() -> None:
    recorder = GraphRecorder(DEVICE)
    sizes = [recorder.size_of(alone([(0, 0, 0, 0)] * requests)).tokens for requests in range(1, 513)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(0 <= rows - requests <= max(7, requests // 8) for requests, rows in enumerate(sizes, start=1))
    assert len(set(sizes)) < 40


class _Cuda:
    """A stand-in for `torch.cuda` that records the calls of a capture."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self, _device: torch.device) -> SimpleNamespace:  # noqa: N802 - PyTorch's name
        return SimpleNamespace(wait_stream=lambda _: self.called.append("wait for the caller's stream"))

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda _: self.called.append("the caller's stream waits"))

    @contextmanager
    def stream(self, _stream: object) -> Iterator[None]:
        self.called.append("apart")
        yield
        self.called.append("back")

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(
            capture_begin=lambda **how: self.called.append(f"begin {how['pool']} {how['capture_error_mode']}"),
            capture_end=lambda: self.called.append("end"),
            replay=lambda: self.called.append("replay"),
        )


def test_a_step_is_captured_after_it_has_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    recorder = GraphRecorder(torch.device("cuda"))

    def compute() -> tuple[Tensor | None, ...]:
        cuda.called.append("compute")
        return ()

    _, run = recorder.record(compute)
    run()
    captured = ["begin pool thread_local", "compute", "end"]
    before, behind = ["wait for the caller's stream", "apart", "compute"], ["back", "the caller's stream waits"]
    assert cuda.called == [*before, *captured, *behind, "replay"]


def test_a_capture_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)

    def fail() -> tuple[Tensor | None, ...]:
        raise RuntimeError("not to be captured")

    with pytest.raises(RuntimeError, match="not to be captured"):
        GraphRecorder(torch.device("cuda")).record(lambda: (), fail)
    assert cuda.called[-1] == "end"


def test_triton_kernels_can_be_recorded() -> None:
    assert isinstance(TritonKernels().recorder(DEVICE), GraphRecorder)
