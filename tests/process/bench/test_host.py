"""The host path without a model: what is measured is first proven."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from orca.bench.host.commits import CommitLoad
from orca.bench.host.null_engine import NullEngine, expected_token
from orca.bench.main import main as bench
from orca.core.domain.engine import EngineShape
from orca.core.domain.request import SamplingParams, Token
from orca.core.domain.step import Claim, Epoch, NewRequest, Row, Sampled, Step
from orca.planner.workload.lengths import Range

SHAPE = EngineShape(stages=1, slots=4096, block_tokens=16, max_model_len=512)
EPOCH = Epoch(1, "p")
VOCAB = 2048


def a_step(number: int, *, logged: int | None = None) -> Step:
    """A step of one request; `logged` tokens of its log come with the step that brings it."""
    new = ()
    if logged is not None:
        new = (
            NewRequest(
                handle=1,
                request_id="r.0",
                claim=Claim(1, "p/1"),
                tokens=(5,) * (3 + logged),
                prompt_length=3,
                max_total_tokens=16,
                sampling=SamplingParams(),
            ),
        )
    return Step(epoch=EPOCH, number=number, new=new, rows=(Row(handle=1, start=0, count=1, sample=True),))


async def test_the_null_engine_draws_by_request_and_index_also_after_a_log() -> None:
    engine = NullEngine(SHAPE, vocab_size=VOCAB)
    await engine.form(EPOCH)
    await engine.submit(a_step(1, logged=4))
    await engine.submit(a_step(2))
    results = engine.results()
    sampled = [(await anext(results)).sampled for _ in range(2)]
    assert sampled == [(Sampled(1, index, Token(expected_token("r.0", index, VOCAB))),) for index in (4, 5)]
    assert len({expected_token("r.0", index, VOCAB) for index in range(VOCAB)}) == VOCAB, (
        "neighbours differ for a whole round"
    )


async def test_the_null_engine_never_answers_in_the_same_loop_iteration() -> None:
    engine = NullEngine(SHAPE, vocab_size=VOCAB)
    await engine.form(EPOCH)
    answer = asyncio.ensure_future(anext(engine.results()))
    await asyncio.sleep(0)
    await engine.submit(a_step(1, logged=0))
    assert not answer.done()
    assert (await answer).number == 1


async def test_steps_of_the_null_engine_take_their_time_one_after_the_other() -> None:
    engine = NullEngine(SHAPE, vocab_size=VOCAB, step_us=20_000)
    await engine.form(EPOCH)
    start_s = asyncio.get_running_loop().time()
    await engine.submit(a_step(1, logged=0))
    await engine.submit(a_step(2))
    results = engine.results()
    assert [(await anext(results)).number for _ in range(2)] == [1, 2]
    assert asyncio.get_running_loop().time() - start_s >= 0.04


class LateLoop(asyncio.SelectorEventLoop):
    """A loop whose first timer is late, as one of uvloop is if its process loses the processor while it is set."""

    has_timer = False

    def call_at(self, when: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        late_s, self.has_timer = 0.0 if self.has_timer else 0.1, True
        return super().call_at(when + late_s, *args, **options)


def test_results_of_the_null_engine_keep_their_order_on_a_late_loop() -> None:
    async def run_two() -> list[int]:
        engine = NullEngine(SHAPE, vocab_size=VOCAB, step_us=20_000)
        await engine.form(EPOCH)
        await engine.submit(a_step(1, logged=0))
        await engine.submit(a_step(2))
        results = engine.results()
        return [(await anext(results)).number for _ in range(2)]

    with asyncio.Runner(loop_factory=LateLoop) as runner:
        assert runner.run(run_two()) == [1, 2]


async def test_the_null_engine_forms_on_request() -> None:
    before_forming = asyncio.Event()

    async def told() -> None:
        await before_forming.wait()

    engine = NullEngine(SHAPE, vocab_size=VOCAB, before_forming=told)
    forming = asyncio.ensure_future(engine.form(EPOCH))
    await asyncio.sleep(0)
    assert not forming.done()
    before_forming.set()
    assert await forming == SHAPE


def test_a_load_fills_at_least_two_batches() -> None:
    load = CommitLoad(batch_size=8, tokens=1, new_tokens=Range(2, 4), prompt_tokens=3, step_us=0)
    requests = load.requests("r1")
    assert len(requests) == 16
    assert all(2 <= request.max_new_tokens <= 4 for request in requests)


def test_several_schedulers_and_gateways_share_the_work(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    # With steps that take no time, one scheduler may have done everything before the other one has claimed a request.
    sizes = ["--batch-sizes", "4", "--tokens", "3000", "--waiting", "300", "--streams", "4", "--rate", "1000"]
    sizes += ["--step-us", "5000"]
    assert bench(["host", *sizes, "--schedulers", "2", "--gateways", "2", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    [committed], [streamed] = figures["commits"], figures["events"]
    assert (committed["schedulers"], streamed["gateways"]) == (2, 2)
    assert committed["tokens"] >= 3000
    assert committed["least_tokens"] > 0
    assert streamed["events"] == 4 * 256


def test_the_host_path_commits_and_streams_what_was_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    sizes = ["--batch-sizes", "4", "--tokens", "1500", "--waiting", "0,300", "--streams", "2", "--rate", "1000"]
    assert bench(["host", *sizes, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    [committed, crowded], [streamed] = figures["commits"], figures["events"]
    assert (committed["waiting"], crowded["waiting"]) == (0, 300)
    assert committed["tokens"] >= 1500
    assert committed["steps"] >= committed["tokens"] / 4
    assert streamed["events"] == 2 * 256
    assert streamed["gateway_s"] > 0
    assert "every log has the engine's tokens" in capsys.readouterr().out


def test_refused_requests_are_measured_beside_clients_whose_tokens_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    sizes = ["--refused-every", "0.1", "--step-us", "2000"]
    assert bench(["host", "--only", "refusals", *sizes, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["commits"] == figures["events"] == []
    [refused] = figures["refusals"]
    assert (refused["clients"], refused["bad_prompts"], refused["interval_s"]) == (8, 15, 0.1)
    assert refused["tokens"] >= 2 * 8 * 128
    assert len(refused["disturbed_p99_s"]) == len(refused["undisturbed_p99_s"]) == 5
    assert min(refused["disturbed_p99_s"]) > 0
    assert "no epoch ended" in capsys.readouterr().out
